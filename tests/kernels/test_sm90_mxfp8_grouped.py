"""The grouped path: segments, activations in E4M3, and the layer, against a reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from m3_kernels.reference.coarsen_mxfp8 import block_scales, coarsen_mxfp8
from m3_kernels.reference.dequantize_mxfp8 import dequantize_mxfp8
from m3_kernels.reference.mxfp8_experts import mxfp8_experts as reference_experts
from torch import Tensor

from tests.kernels.sm90 import DEVICE, REAL

from m3_kernels.triton import sm90_mxfp8_grouped  # isort: skip
from m3_kernels.triton.sm90_mxfp8_grouped import (  # isort: skip
    SEGMENT,
    GroupedProducts,
    Places,
    Quantized,
    grouped_experts,
    masked_rows,
    masked_tokens,
    place_contiguous,
    place_masked,
    quantize_active,
    quantize_rows,
)
from tests.kernels.test_sm90_mxfp8 import ALPHA, LIMIT, experts_case, relative, weight  # isort: skip

ROUNDING = 0.03 if REAL else 0.09
"""Relative error of rounding to E4M3; the interpreter truncates."""


def numbers_of(quantized: Quantized) -> Tensor:
    values, scale = quantized
    return (values.double().unflatten(-1, (-1, 128)) * scale.double()[..., None]).flatten(-2)


def test_coarsening_rounds_only_what_becomes_subnormal_and_is_idempotent() -> None:
    generator = torch.Generator().manual_seed(1)
    value, scale = weight(generator, 256, 384)
    scale[5] = torch.arange(107, 119, dtype=torch.uint8)
    before = dequantize_mxfp8(value, scale, torch.float64)
    old_scale = scale.clone()
    result = coarsen_mxfp8(value, scale)
    after = dequantize_mxfp8(value, scale, torch.float64)
    blocks = scale.view(2, 128, 3, 4)
    assert torch.equal(blocks, old_scale.view(2, 128, 3, 4).amax((1, 3), keepdim=True).expand_as(blocks))
    unit = torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    assert ((after - before).abs() <= unit * 2.0**-10).all(), "at most half a subnormal unit"
    normal = before.abs() >= unit * 2.0**-6
    assert torch.equal(after[normal], before[normal])
    assert result.values == 256 * 384 and result.changed == int((after != before).sum()) > 0
    assert result.relative_error == pytest.approx(float((after - before).norm() / before.norm()))
    assert coarsen_mxfp8(value, scale).changed == 0
    factors = block_scales(scale).double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(value.double() * factors, after)


@pytest.mark.parametrize("shape", [(100, 128), (128, 96)])
def test_weights_that_blocks_do_not_divide_are_refused(shape: tuple[int, int]) -> None:
    value, scale = weight(torch.Generator().manual_seed(0), *shape)
    with pytest.raises(ValueError, match="do not divide"):
        coarsen_mxfp8(value, scale)


def routed_ids(tokens: int) -> tuple[Tensor, Tensor]:
    """Choices of three among experts -1 to 8, and their numbers on a rank that has 2 to 6."""
    ids = torch.randint(-1, 9, (tokens, 3), generator=torch.Generator().manual_seed(tokens))
    return ids, ids.flatten() - 2


@pytest.mark.parametrize("tokens", [1, 90, 700])
def test_every_local_pair_has_a_row_of_its_experts_in_order(tokens: int) -> None:
    ids, local = routed_ids(tokens)
    here = (local >= 0) & (local < 5)
    masked = place_masked(ids.to(DEVICE), 5, 2)
    follow = place_contiguous(ids.to(DEVICE), 5, 2)
    capacity = -(-tokens // SEGMENT) * SEGMENT
    assert masked.shape == (5, capacity) and masked.experts is None
    worst = -(-(tokens * 3 + 5 * (SEGMENT - 1)) // SEGMENT) * SEGMENT
    assert follow.shape == (worst,)
    owner, begin = torch.full((worst,), -1), 0
    for expert in range(5):
        mine = torch.where(local == expert)[0]
        numbers = torch.arange(len(mine))
        assert masked.row.cpu()[mine].tolist() == (expert * capacity + numbers).tolist()
        assert follow.row.cpu()[mine].tolist() == (begin + numbers).tolist()
        assert masked.counts[expert] == follow.counts[expert] == len(mine)
        size = -(-len(mine) // SEGMENT) * SEGMENT
        owner[begin : begin + size] = expert
        begin += size
    assert follow.experts.tolist() == owner.tolist()
    for places in (masked, follow):
        assert (places.row.cpu()[~here] == -1).all(), "another rank's pair has no row"


def test_tokens_are_divided_by_the_room_that_the_rank_needs() -> None:
    small, large = 1 << 16, 1 << 17
    assert masked_tokens(8192, 16, 128, large) == 8192 and masked_tokens(8193, 16, 128, large) == 8192
    assert masked_tokens(8192, 16, 128, small) == 4096, "EP8 with less memory: part by part"
    assert masked_tokens(4096, 16, 128, small) == 4096 and masked_tokens(33, 16, 128, small) == 33
    assert masked_tokens(512, 128, 128, small) == 512, "TP8"
    assert masked_tokens(513, 128, 128, small) == 0, "TP8 with many tokens: contiguous"
    assert masked_tokens(8192, 32, 128, small) == 2048 and masked_tokens(8192, 64, 128, small) == 0
    assert masked_tokens(9, 100_000, 100_000, small) == 0


def test_room_follows_the_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {"total_memory": 150e9}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    masked_rows.cache_clear()
    assert masked_rows(torch.device("cuda")) == 1 << 17 and masked_rows(torch.device("cpu")) == 1 << 16
    properties["total_memory"] = 85e9
    masked_rows.cache_clear()
    assert masked_rows(torch.device("cuda")) == 1 << 16
    masked_rows.cache_clear()


def test_activations_are_rounded_once_with_a_scale_per_row_and_group() -> None:
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(9, 384, generator=generator) * torch.logspace(-6, 3, 9)[:, None]).bfloat16()
    x[4] = 0
    whole = quantize_rows(x.to(DEVICE), None)
    assert whole[1].stride() == (1, 12) and whole[1].shape == (9, 3)
    assert relative(numbers_of(whole).cpu(), x) < ROUNDING and not numbers_of(whole)[4].any()
    # Two choices for each token, the second of tokens 0 and 8 here, among two experts with room for four.
    row = torch.full((18,), -1, dtype=torch.int32)
    row[1], row[17], row[8] = 4, 0, 1
    places = Places((2, 4), row.to(DEVICE), torch.tensor([2, 1]), None)
    got = quantize_rows(x.to(DEVICE), places)
    assert got[1].stride() == (12, 1, 4) and got[1].shape == (2, 4, 3)
    numbers = numbers_of(got).cpu().flatten(0, 1)
    for where, token in ((4, 0), (0, 8), (1, 4)):
        assert torch.equal(numbers[where], numbers_of(whole).cpu()[token])


def test_the_activation_is_computed_beyond_the_limits() -> None:
    gate_up = (torch.randn(2, 4, 2 * 256, generator=torch.Generator().manual_seed(4)) * 8).bfloat16()
    row = torch.tensor([5, -1, 0, 6], dtype=torch.int32)
    places = Places((2, 4), row.to(DEVICE), torch.tensor([1, 2]), None)
    got = numbers_of(quantize_active(gate_up.to(DEVICE), places, ALPHA, LIMIT)).cpu().flatten(0, 1)[[5, 0, 6]]
    gate, up = gate_up.double().flatten(0, 1)[[5, 0, 6]].chunk(2, 1)
    assert gate.abs().max() > LIMIT + 1 and up.abs().max() > LIMIT + 1
    gate = gate.clamp(max=LIMIT)
    want = (up.clamp(-LIMIT, LIMIT) + 1) * gate / (1 + torch.exp(-ALPHA * gate))
    assert relative(got, want) < ROUNDING


def contiguous(activations: Quantized, weights: Quantized, out: Tensor, experts: Tensor) -> None:
    """The product of the contiguous layout in float64; rows without an expert are spoilt."""
    rows = numbers_of(activations)
    scales = weights[1].double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    out.fill_(float("nan"))
    for expert in range(len(scales)):
        mine = experts == expert
        out[mine] = (rows[mine] @ (weights[0][expert].double() * scales[expert]).T).to(out.dtype)


def masked(activations: Quantized, weights: Quantized, out: Tensor, counts: Tensor, expected: int) -> None:
    """Likewise of the masked layout."""
    assert expected > 0 and out.shape[:2] == activations[0].shape[:2]
    scales = weights[1].double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    out.fill_(float("nan"))
    for expert, count in enumerate(counts.tolist()):
        rows = numbers_of(tuple(part[expert, :count] for part in activations))
        out[expert, :count] = (rows @ (weights[0][expert].double() * scales[expert]).T).to(out.dtype)


PRODUCTS = GroupedProducts(masked, contiguous)


@pytest.mark.parametrize("layout", ["masked", "masked in parts", "contiguous"])
@pytest.mark.parametrize(("tokens", "first", "last"), [(1, 0, 2), (140, 1, 2), (0, 0, 2)])
def test_the_layer_is_the_reference_up_to_rounded_activations(
    tokens: int, first: int, last: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = {"masked": tokens, "masked in parts": 64, "contiguous": 0}[layout]
    monkeypatch.setattr(sm90_mxfp8_grouped, "masked_tokens", lambda *sizes: together)
    case = experts_case(tokens, max(1, tokens), 3, 256, 128, 2)
    case |= {name: case[name][:tokens] for name in ("x", "topk_ids", "topk_weights")}
    case["topk_ids"][::5] = -1
    case["topk_weights"][::5] = float("nan")
    rank = slice(first, last + 1)
    for name in ("w13", "w2"):
        for expert in range(3):
            coarsen_mxfp8(case[name][expert], case[f"{name}_scale"][expert])
    given = [(case[name][rank], block_scales(case[f"{name}_scale"][rank])) for name in ("w13", "w2")]
    shape = {"alpha": ALPHA, "limit": LIMIT, "first_expert": first}
    routed = (case["topk_ids"], case["topk_weights"])
    got = grouped_experts(case["x"], *given, *routed, PRODUCTS, **shape)
    part = {name: case[name][rank] for name in ("w13", "w13_scale", "w2", "w2_scale")}
    want = reference_experts(**case | part | {"x": case["x"].double()}, **shape)
    assert got.shape == want.shape and not got[::5].any()
    if tokens > 1:
        assert relative(got, want) < 2.5 * ROUNDING


@pytest.mark.parametrize("together", [4, 0], ids=["masked", "contiguous"])
def test_a_rank_without_tokens_multiplies_nothing(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90_mxfp8_grouped, "masked_tokens", lambda *sizes: together)
    case = experts_case(5, 4, 2, 128, 128, 2)
    given = [(case[name], block_scales(case[f"{name}_scale"])) for name in ("w13", "w2")]
    rows = []

    def counting(activations: Quantized, weights: Quantized, out: Tensor, counts: Tensor, _: int) -> None:
        rows.append(int(counts.sum()))

    def looking(activations: Quantized, weights: Quantized, out: Tensor, experts: Tensor) -> None:
        rows.append(int((experts >= 0).sum()))

    ids = case["topk_ids"] + 2
    products = GroupedProducts(counting, looking)
    shape = {"alpha": ALPHA, "limit": LIMIT, "first_expert": 0}
    out = grouped_experts(case["x"], *given, ids, case["topk_weights"], products, **shape)
    assert not out.any() and rows == [0, 0]
