"""The sm90 MXFP8 products against float64 on the dequantised weights."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from m3_kernels.reference.dequantize_mxfp8 import dequantize_mxfp8
from m3_kernels.reference.mxfp8_experts import mxfp8_experts as reference_experts
from m3_kernels.reference.mxfp8_linear import mxfp8_linear as reference_linear
from m3_kernels.reference.quantize_mxfp8 import quantize_mxfp8
from torch import Tensor

from tests.kernels.sm90 import DEVICE, REAL

from m3_kernels.triton.sm90_mxfp8_experts import ExpertsTile, mxfp8_experts, route  # isort: skip
from m3_kernels.triton.sm90_mxfp8_linear import (  # isort: skip
    TOKENS_OF_EVERY_KERNEL,
    linear_tile,
    mxfp8_linear,
)
from m3_kernels.triton.sm90_mxfp8_linear_tiles import LinearTile  # isort: skip

ALPHA, LIMIT = 1.702, 7.0
ONE_PRODUCT, TWO_PRODUCTS = (3e-3, 6e-3) if REAL else (6e-3, 2e-2)
"""Relative errors of results rounded to bfloat16 once and three times; the interpreter truncates instead."""


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def weight(generator: torch.Generator, *shape: int, std: float = 1.0) -> tuple[Tensor, Tensor]:
    """A weight whose groups of 32 differ in scale by up to 2 ** 6."""
    spread = torch.exp2(torch.randint(-3, 4, (*shape[:-1], shape[-1] // 32), generator=generator).float())
    values = torch.randn(*shape, generator=generator).unflatten(-1, (-1, 32)) * spread[..., None]
    value, scale = quantize_mxfp8(values.flatten(-2) * std / shape[-1] ** 0.5)
    return value.to(DEVICE), scale.to(DEVICE)


@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [
        (1, 64, 128),
        (3, 100, 96),
        (16, 192, 416),
        (33, 72, 544),
        (64, 40, 1024),
        (130, 136, 160),
        (77, 256, 64),
    ],
)
def test_linear_equals_float64(tokens: int, rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    value, scale = weight(generator, rows, columns)
    x = torch.randn(tokens, columns, generator=generator).bfloat16().to(DEVICE)
    got = mxfp8_linear(x, value, scale)
    want = reference_linear(x.double(), value, scale)
    assert got.shape == (tokens, rows) and got.dtype == torch.bfloat16
    assert relative(got, want) < ONE_PRODUCT


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "tile"),
    [
        (37, 80, 672, LinearTile(64, tokens=16, chunks=1, steps=5, walks=2)),
        (16, 200, 672, LinearTile(64, 16, 4, 1, 1)),
        (50, 130, 768, LinearTile(128, 64, 1, 2, 1)),
        (65, 33, 1024, LinearTile(128, 32, 2, 2, 1)),
        (3, 100, 96, LinearTile(64, 32, 1, 1, 1)),
    ],
)
def test_split_sums_and_strided_rows_change_nothing(
    tokens: int, rows: int, columns: int, tile: LinearTile
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    value, scale = weight(generator, rows, columns)
    x = torch.randn(tokens, columns + 24, generator=generator).bfloat16().to(DEVICE)[:, :columns]
    got = mxfp8_linear(x, value, scale, tile=tile)
    assert relative(got, reference_linear(x.double(), value, scale)) < ONE_PRODUCT
    assert torch.equal(got, mxfp8_linear(x, value, scale, tile=tile))
    for token in (0, tokens - 1):
        alone = mxfp8_linear(x[token : token + 1], value, scale, tile=tile)
        assert torch.equal(alone[0], got[token]), f"token {token} depends on its neighbours"


@pytest.mark.skipif(not REAL, reason="launches overlap on a GPU only")
@pytest.mark.parametrize("tokens", [5, 20, 48])
def test_launches_that_begin_early_wait_for_what_they_read(tokens: int) -> None:
    generator = torch.Generator().manual_seed(3)
    layers = [weight(generator, 1536, 1536) for _ in range(4)]
    x = torch.randn(tokens, 1536, generator=generator).bfloat16().to(DEVICE)

    def run(pause: bool) -> Tensor:
        out = x
        for layer in layers * 8:
            out = mxfp8_linear(out, *layer)
            if pause:
                torch.cuda.synchronize()
        return out

    want = run(pause=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(pause=False)
    for _ in range(50):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("rows", "columns"), [(1536, 6144), (6144, 1024), (768, 6144), (6144, 1536), (6144, 384)]
)
@pytest.mark.parametrize("tokens", [9, 16, 17, 32, 33, 64])
def test_m3s_weights_are_held_by_programs_that_run_at_once(tokens: int, rows: int, columns: int) -> None:
    tile = linear_tile(tokens, rows, columns, 132)
    programs = -(-rows // tile.rows) * -(-columns // tile.columns) * tile.walks
    assert programs <= 132 * (128 // tile.rows), f"{programs} programs, {tile}"
    assert tile.columns <= (640 if tile.tokens == 64 else 768), f"{tile} does not fit registers"


@pytest.mark.parametrize(("rows", "columns"), [(1536, 6144), (6144, 384), (3072, 6144), (40, 96)])
def test_few_products_need_every_kernel_that_any_product_needs(rows: int, columns: int) -> None:
    def kernels(tokens: Iterable[int]) -> set[object]:
        return {linear_tile(count, rows, columns, 132) for count in tokens}

    assert kernels(range(1, 200)) == kernels(TOKENS_OF_EVERY_KERNEL)


def every_number(*scales: int) -> tuple[Tensor, Tensor]:
    """Every E4M3 value but NaN under each of these scale bytes, one row per value and scale."""
    bytes_ = torch.arange(256, dtype=torch.uint8)
    bytes_ = bytes_[(bytes_ & 0x7F) != 0x7F]
    value = torch.zeros(len(bytes_) * len(scales), 32, dtype=torch.uint8)
    value[:, 7] = bytes_.repeat(len(scales))
    scale = torch.tensor(scales, dtype=torch.uint8).repeat_interleave(len(bytes_))[:, None]
    return value.view(torch.float8_e4m3fn), scale.contiguous()


def test_every_value_is_exact_in_registers_under_every_scale_that_weights_have() -> None:
    value, scale = every_number(*range(74, 199, 1 if REAL else 31))
    identity = torch.eye(32, dtype=torch.bfloat16, device=DEVICE)
    got = mxfp8_linear(identity, value.to(DEVICE), scale.to(DEVICE)).T.cpu()
    want = dequantize_mxfp8(value, scale, torch.bfloat16)
    wrong = (got != want).nonzero()
    assert len(wrong) == 0, f"{len(wrong)} differ, first row {wrong[0].tolist()}"


def test_scales_beyond_those_of_weights_give_almost_zero_or_nan() -> None:
    tiny, huge = every_number(0, 1, 40, 73), every_number(199, 254, 255)
    identity = torch.eye(32, dtype=torch.bfloat16, device=DEVICE)
    got = mxfp8_linear(identity, tiny[0].to(DEVICE), tiny[1].to(DEVICE)).T.double().cpu()
    assert (got - dequantize_mxfp8(*tiny, torch.float64)).abs().max() < 2.0**-68
    assert mxfp8_linear(identity, huge[0].to(DEVICE), huge[1].to(DEVICE)).isnan().all()


def experts_case(seed: int, tokens: int, experts: int, columns: int, inner: int, topk: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    w13, w13_scale = weight(generator, experts, 2 * inner, columns, std=4.0)
    w2, w2_scale = weight(generator, experts, columns, inner)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:topk] for _ in range(tokens)]).int()
    return {
        "x": torch.randn(tokens, columns, generator=generator).bfloat16().to(DEVICE) * 2,
        "w13": w13,
        "w13_scale": w13_scale,
        "w2": w2,
        "w2_scale": w2_scale,
        "topk_ids": ids.to(DEVICE),
        "topk_weights": (torch.rand(tokens, topk, generator=generator) + 0.1).to(DEVICE),
    }


def run(operator: object, case: dict, first: int, last: int, **more: object) -> Tensor:
    rank = slice(first, last + 1)
    part = {name: case[name][rank] for name in ("w13", "w13_scale", "w2", "w2_scale")}
    return operator(**case | part, alpha=ALPHA, limit=LIMIT, first_expert=first, **more)


@pytest.mark.parametrize(
    ("tokens", "experts", "columns", "inner", "topk", "first", "last"),
    [
        (1, 4, 128, 64, 2, 0, 3),
        (21, 5, 96, 160, 3, 1, 3),
        (40, 3, 160, 96, 2, 0, 2),
        (150, 2, 128, 64, 1, 0, 1),
    ],
)
def test_experts_equal_float64_beyond_the_limits(
    tokens: int, experts: int, columns: int, inner: int, topk: int, first: int, last: int
) -> None:
    case = experts_case(tokens, tokens, experts, columns, inner, topk)
    got = run(mxfp8_experts, case, first, last)
    want = run(reference_experts, case | {"x": case["x"].double()}, first, last)
    gate_up = reference_linear(case["x"].double(), case["w13"][first], case["w13_scale"][first])
    assert gate_up.abs().max() > LIMIT + 1
    assert relative(got, want) < TWO_PRODUCTS
    assert torch.equal(got, run(mxfp8_experts, case, first, last))


@pytest.mark.parametrize(("walks", "id_dtype"), [(1, torch.int32), (3, torch.int64)])
def test_padded_and_foreign_choices_contribute_nothing(walks: int, id_dtype: torch.dtype) -> None:
    case = experts_case(7, 37, 5, 96, 64, 2)
    case["topk_ids"] = case["topk_ids"].to(id_dtype)
    case["topk_ids"][::4] = -1
    case["topk_ids"][1] = 9
    case["topk_weights"][::4] = float("nan")
    got = run(mxfp8_experts, case, 1, 3, tile=ExpertsTile(64, 16, 32, walks, 4, 2))
    want = run(reference_experts, case | {"x": case["x"].double()}, 1, 3)
    assert not got[::4].any() and not got[1].any()
    assert relative(got, want) < TWO_PRODUCTS


def test_a_rank_without_tokens_reads_no_weight_and_gives_zeros() -> None:
    case = experts_case(3, 6, 4, 64, 32, 2)
    case["topk_ids"] %= 2
    case["w13_scale"][2:] = 255
    case["w2_scale"][2:] = 255
    assert not run(mxfp8_experts, case, 2, 3).any()
    assert run(mxfp8_experts, case, 0, 3).isfinite().all()
    none = {name: case[name][:0] for name in ("x", "topk_ids", "topk_weights")}
    assert run(mxfp8_experts, case | none, 0, 3).shape == (0, 64)


@pytest.mark.parametrize("tokens", [1, 300, 9000 if REAL else 1500])
def test_pairs_are_ordered_by_expert_and_number(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, 9, (tokens, 3), generator=generator)
    x = torch.randn(tokens, 96, generator=generator).bfloat16()
    order, offset, placed = route(ids.to(DEVICE), 4, 2, x.to(DEVICE))
    local = ids.flatten() - 2
    expected = [torch.where(local == expert)[0] for expert in range(4)]
    assert offset.tolist() == [0, *torch.tensor([len(e) for e in expected]).cumsum(0).tolist()]
    assert order[: offset[-1]].tolist() == torch.cat(expected).tolist()
    groups = x.view(-1, 4, 2, 2).transpose(1, 2)  # of 16 columns: 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, ...
    assert torch.equal(placed.cpu(), groups.reshape(x.shape))
