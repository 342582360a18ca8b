"""Nothing in a MoE layer reads the device on the host, so every step can be captured in a CUDA graph.

Tensors are on the meta device, which has shapes but no values: reading one raises. Kernels note their launch.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels import sm90  # noqa: F401 (decides how kernels are defined)

from m3_kernels.triton import (  # isort: skip
    sm90_mxfp8_dequantize,
    sm90_mxfp8_experts,
    sm90_mxfp8_experts_few,
    sm90_mxfp8_grouped,
    sm90_mxfp8_linear,
    sm90_mxfp8_linear_few,
    sm90_mxfp8_linear_tiles,
)

MODULES = (
    sm90_mxfp8_dequantize,
    sm90_mxfp8_experts,
    sm90_mxfp8_experts_few,
    sm90_mxfp8_grouped,
    sm90_mxfp8_linear,
    sm90_mxfp8_linear_few,
    sm90_mxfp8_linear_tiles,
)

META = torch.device("meta")
HIDDEN, WIDTH, EXPERTS, TOPK = 6144, 3072, 128, 4


class Launches:
    """Stands for a kernel: `kernel[grid](...)` adds its name and the programs of its grid."""

    def __init__(self, name: str, noted: list[tuple[str, tuple[int, ...]]]) -> None:
        self.name = name
        self.noted = noted

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        return lambda *given, **constants: self.noted.append((self.name, grid))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    noted: list[tuple[str, tuple[int, ...]]] = []
    for module in MODULES:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Launches(name, noted))
    return noted


def weights(experts: int, width: int) -> dict[str, Tensor]:
    shapes = {"w13": (experts, 2 * width, HIDDEN), "w2": (experts, HIDDEN, width)}
    found = {
        name: torch.empty(shape, dtype=torch.float8_e4m3fn, device=META) for name, shape in shapes.items()
    }
    for name, (_, rows, columns) in shapes.items():
        scale = torch.empty(experts, rows, columns // 32, dtype=torch.uint8, device=META)
        found[f"{name}_scale"] = scale
    return found


def routed(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device=META)
    ids = torch.empty(tokens, TOPK, dtype=torch.int32, device=META)
    return x, ids, torch.empty(tokens, TOPK, device=META)


RANKS = [(16, 3072), (128, 384)]
"""Experts and width of one rank of EP8 and of TP8."""
SIZES = {"alpha": 1.702, "limit": 7.0, "first_expert": 0, "model_experts": EXPERTS}


@pytest.mark.parametrize(("experts", "width"), RANKS)
@pytest.mark.parametrize("tokens", [1, 3, 64, 255, 8192])
def test_few_tokens_never_wait_for_the_device(
    experts: int, width: int, tokens: int, launched: list[tuple[str, tuple[int, ...]]]
) -> None:
    x, ids, gates = routed(tokens)
    given = weights(experts, width)
    out = sm90_mxfp8_experts.mxfp8_experts(x, **given, topk_ids=ids, topk_weights=gates, **SIZES)
    assert out.shape == (tokens, HIDDEN) and out.device == META
    names = [name for name, _ in launched]
    few = 4 * tokens <= 16 * EXPERTS
    products = ["_gate_up_few_kernel", "_down_few_kernel"] if few else ["_gate_up_kernel", "_down_kernel"]
    assert names == ["_route_kernel", *products, "_sum_kernel"]


@pytest.mark.parametrize(("experts", "width"), RANKS)
@pytest.mark.parametrize("tokens", [4, 33, 700, 8192])
@pytest.mark.parametrize("room", [1 << 16, 1 << 17], ids=["80 GB", "141 GB"])
def test_many_tokens_never_wait_for_the_device(
    experts: int,
    width: int,
    tokens: int,
    room: int,
    launched: list[tuple[str, tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sm90_mxfp8_grouped, "masked_rows", lambda device: room)
    x, ids, gates = routed(tokens)
    given = weights(experts, width)
    blocks = [
        (w, torch.empty(experts, w.shape[1] // 128, w.shape[2] // 128, device=META))
        for w in (given["w13"], given["w2"])
    ]
    used: list[tuple[str, int]] = []
    products = sm90_mxfp8_grouped.GroupedProducts(
        lambda rows, weight, out, counts, expected: used.append(("masked", out.shape[:2].numel())),
        lambda rows, weight, out, owner: used.append(("contiguous", out.shape[0])),
    )
    out = sm90_mxfp8_grouped.grouped_experts(x, *blocks, ids, gates, products, **SIZES)
    assert out.shape == (tokens, HIDDEN) and out.device == META
    masked = experts * tokens <= room or experts == 16
    assert {how for how, _ in used} == {"masked" if masked else "contiguous"}
    assert max(rows for _, rows in used) <= room
    passes = sum(name == "_rank_kernel" for name, _ in launched)
    assert len(used) == 2 * passes == (4 if (experts, tokens, room) == (16, 8192, 1 << 16) else 2)


@pytest.mark.parametrize(
    ("tokens", "rows", "kernels"),
    [
        (7, 6144, ["_few_kernel"]),
        (7, 1280, ["_tiles_kernel", "_add_kernel"]),
        (100, 1280, ["_tiles_kernel", "_add_kernel"]),
        (300, 1280, ["_dequantize_kernel"]),
    ],
)
def test_a_linear_never_waits_for_the_device(
    tokens: int,
    rows: int,
    kernels: list[str],
    launched: list[tuple[str, tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sm90_mxfp8_linear, "multiprocessors", lambda device: 132)
    weight = torch.empty(rows, HIDDEN, dtype=torch.float8_e4m3fn, device=META)
    scale = torch.empty(rows, HIDDEN // 32, dtype=torch.uint8, device=META)
    x = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device=META)
    assert sm90_mxfp8_linear.mxfp8_linear(x, weight, scale).shape == (tokens, rows)
    values, scales = sm90_mxfp8_grouped.quantize_rows(x, None)
    assert values.shape == x.shape and scales.shape == (tokens, 48)
    assert scales.stride() == (1, -(-tokens // 4) * 4)
    assert [name for name, _ in launched] == [*kernels, "_quantize_kernel"]
