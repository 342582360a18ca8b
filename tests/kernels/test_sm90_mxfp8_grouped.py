"""The grouped path: segments, activations in E4M3, and the layer, against a reference."""

from __future__ import annotations

import pytest
import torch
from m3_kernels.reference.coarsen_mxfp8 import block_scales, coarsen_mxfp8
from m3_kernels.reference.dequantize_mxfp8 import dequantize_mxfp8
from m3_kernels.reference.mxfp8_experts import mxfp8_experts as reference_experts
from torch import Tensor

from tests.kernels.sm90 import DEVICE, REAL

from m3_kernels.triton.sm90_mxfp8_grouped import (  # isort: skip
    SEGMENT,
    Quantized,
    grouped_experts,
    place,
    quantize_active,
    quantize_rows,
)
from tests.kernels.test_sm90_mxfp8 import ALPHA, LIMIT, experts_case, relative, weight  # isort: skip

ROUNDING = 0.03 if REAL else 0.09
"""Relative error of rounding to E4M3; the interpreter truncates."""


def numbers_of(quantized: Quantized) -> Tensor:
    values, scale = quantized
    return (values.double().unflatten(1, (-1, 128)) * scale.double()[..., None]).flatten(1)


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


@pytest.mark.parametrize("room_for_all", [True, False])
@pytest.mark.parametrize("tokens", [1, 90, 700])
def test_segments_hold_every_local_pair_once_in_order(tokens: int, room_for_all: bool) -> None:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, 9, (tokens, 3), generator=generator)
    segments = place(ids.to(DEVICE), 5, 2, room_for_all=room_for_all)
    pair, expert, row = (part.cpu() for part in (segments.pair, segments.expert, segments.row))
    local = ids.flatten() - 2
    at = 0
    for number in range(5):
        mine = torch.where(local == number)[0]
        size = -(-len(mine) // SEGMENT) * SEGMENT
        assert pair[at : at + len(mine)].tolist() == mine.tolist()
        assert (pair[at + len(mine) : at + size] == -1).all() and (expert[at : at + size] == number).all()
        assert row[mine].tolist() == list(range(at, at + len(mine)))
        at += size
    assert (pair[at:] == -1).all() and (expert[at:] == -1).all()
    worst = -(-(tokens * 3 + 5 * (SEGMENT - 1)) // SEGMENT) * SEGMENT
    assert len(pair) == (worst if room_for_all else at)


def test_activations_are_rounded_once_with_a_scale_per_row_and_group() -> None:
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(9, 384, generator=generator) * torch.logspace(-6, 3, 9)[:, None]).bfloat16()
    x[4] = 0
    pair = torch.tensor([7, -1, 0, 17, 8], dtype=torch.int32)
    got = quantize_rows(x.to(DEVICE), pair.to(DEVICE), 2)
    assert got[1].stride() == (1, 8) and got[1].shape == (5, 3)
    filled = pair >= 0
    want = x[pair[filled] // 2].double()
    assert relative(numbers_of(got).cpu()[filled], want) < ROUNDING
    assert not numbers_of(got)[4].any()
    whole = numbers_of(quantize_rows(x.to(DEVICE), None, 1)).cpu()
    assert relative(whole, x) < ROUNDING


def test_the_activation_is_computed_beyond_the_limits() -> None:
    gate_up = (torch.randn(6, 2 * 256, generator=torch.Generator().manual_seed(4)) * 8).bfloat16()
    pair = torch.tensor([0, 1, 2, 3, 4, -1], dtype=torch.int32)
    got = numbers_of(quantize_active(gate_up.to(DEVICE), pair.to(DEVICE), ALPHA, LIMIT)).cpu()[:5]
    gate, up = gate_up.double()[:5].chunk(2, 1)
    assert gate.abs().max() > LIMIT + 1 and up.abs().max() > LIMIT + 1
    gate = gate.clamp(max=LIMIT)
    want = (up.clamp(-LIMIT, LIMIT) + 1) * gate / (1 + torch.exp(-ALPHA * gate))
    assert relative(got, want) < ROUNDING


def product(activations: Quantized, weights: Quantized, out: Tensor, experts: Tensor) -> None:
    """The grouped product in float64."""
    rows = numbers_of(activations)
    scales = weights[1].double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    for expert in range(len(scales)):
        mine = experts == expert
        out[mine] = (rows[mine] @ (weights[0][expert].double() * scales[expert]).T).to(out.dtype)


@pytest.mark.parametrize("room_for_all", [True, False])
@pytest.mark.parametrize(("tokens", "first", "last"), [(1, 0, 2), (70, 1, 2), (0, 0, 2)])
def test_the_layer_is_the_reference_up_to_rounded_activations(
    tokens: int, first: int, last: int, room_for_all: bool
) -> None:
    case = experts_case(tokens, max(1, tokens), 3, 256, 128, 2)
    case |= {name: case[name][:tokens] for name in ("x", "topk_ids", "topk_weights")}
    case["topk_ids"][::5] = -1
    rank = slice(first, last + 1)
    for name in ("w13", "w2"):
        for expert in range(3):
            coarsen_mxfp8(case[name][expert], case[f"{name}_scale"][expert])
    given = [(case[name][rank], block_scales(case[f"{name}_scale"][rank])) for name in ("w13", "w2")]
    shape = {"alpha": ALPHA, "limit": LIMIT, "first_expert": first}
    routed = (case["topk_ids"], case["topk_weights"])
    got = grouped_experts(case["x"], *given, *routed, product, room_for_all=room_for_all, **shape)
    part = {name: case[name][rank] for name in ("w13", "w13_scale", "w2", "w2_scale")}
    want = reference_experts(**case | part | {"x": case["x"].double()}, **shape)
    assert got.shape == want.shape and not got[::5].any()
    if tokens > 1:
        assert relative(got, want) < 2.5 * ROUNDING
