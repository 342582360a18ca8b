"""Products with MXFP8 weights, experts included, against float64 on the weights' exact numbers."""

from __future__ import annotations

import pytest
import torch
from m3_kernels.reference.dequantize_mxfp8 import dequantize_mxfp8
from m3_kernels.reference.mxfp8_experts import mxfp8_experts
from m3_kernels.reference.mxfp8_linear import mxfp8_linear
from m3_kernels.reference.quantize_mxfp8 import quantize_mxfp8
from torch import Tensor

ALPHA, LIMIT = 1.702, 7.0
NAN = float("nan")


def random_weight(
    shape: tuple[int, ...], generator: torch.Generator, gain: float
) -> tuple[Tensor, Tensor, Tensor]:
    """An MXFP8 weight with row-wise different scales, and its numbers in float64."""
    weight = torch.randn(shape, generator=generator) * gain / shape[-1] ** 0.5
    weight *= torch.exp2(torch.randint(-3, 2, shape[:-1], generator=generator))[..., None]
    values, scale = quantize_mxfp8(weight)
    return values, scale, dequantize_mxfp8(values, scale, torch.float64)


TOLERANCE = {torch.bfloat16: (2**-8, 1e-3), torch.float32: (1e-5, 1e-5), torch.float64: (1e-12, 1e-12)}
"""Relative and absolute: one rounding to the dtype, and float32 accumulation."""


@pytest.mark.parametrize("rows, outputs, inputs", [(0, 5, 32), (1, 1, 32), (7, 37, 96), (33, 130, 160)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_linear_multiplies_by_the_exact_numbers(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, scale, numbers = random_weight((outputs, inputs), generator, 1.0)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    got = mxfp8_linear(x, weight, scale)
    rtol, atol = TOLERANCE[dtype]
    assert got.dtype == dtype and got.shape == (rows, outputs)
    torch.testing.assert_close(got.double(), x.double() @ numbers.T, rtol=rtol, atol=atol)


def test_a_nan_scale_spoils_its_output_column_alone() -> None:
    weight, scale = quantize_mxfp8(torch.ones(5, 64))
    scale[3, 1] = 255
    out = mxfp8_linear(torch.ones(2, 64), weight, scale)
    assert out.isnan().all(0).tolist() == [False, False, False, True, False]
    assert (out[:, [0, 1, 2, 4]] == 64).all()


EXPERTS, HIDDEN, INNER, TOPK = 5, 96, 64, 3


def expert_inputs(tokens: int) -> dict[str, Tensor]:
    """Weights of `EXPERTS` experts that drive gate and up beyond both limits, and routed tokens."""
    generator = torch.Generator().manual_seed(tokens)
    w13, w13_scale, w13_numbers = random_weight((EXPERTS, 2 * INNER, HIDDEN), generator, 12.0)
    w2, w2_scale, w2_numbers = random_weight((EXPERTS, HIDDEN, INNER), generator, 1.0)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(tokens)])
    return {
        "x": torch.randn(tokens, HIDDEN, generator=generator),
        "w13": w13,
        "w13_scale": w13_scale,
        "w13_numbers": w13_numbers,
        "w2": w2,
        "w2_scale": w2_scale,
        "w2_numbers": w2_numbers,
        "ids": ids.int(),
        "weights": torch.rand(tokens, TOPK, generator=generator) + 0.1,
    }


def brute_experts(given: dict[str, Tensor], x: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Float64 outputs of the experts `first` to `last`, token by token, and all gate and up values seen."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    seen = []
    for token in range(x.shape[0]):
        for choice in range(given["ids"].shape[1]):
            expert = int(given["ids"][token, choice])
            if not first <= expert <= last:
                continue
            gate_up = given["w13_numbers"][expert] @ x[token].double()
            seen.append(gate_up)
            gate = torch.where(gate_up[:INNER] > LIMIT, LIMIT, gate_up[:INNER])
            up = gate_up[INNER:].clamp(-LIMIT, LIMIT)
            inner = (up + 1) * gate / (1 + torch.exp(-ALPHA * gate))
            out[token] += float(given["weights"][token, choice]) * (given["w2_numbers"][expert] @ inner)
    return out, torch.stack(seen)


def run_experts(given: dict[str, Tensor], x: Tensor, first: int, last: int) -> Tensor:
    rank = slice(first, last + 1)
    return mxfp8_experts(
        x,
        given["w13"][rank],
        given["w13_scale"][rank],
        given["w2"][rank],
        given["w2_scale"][rank],
        given["ids"],
        given["weights"],
        alpha=ALPHA,
        limit=LIMIT,
        first_expert=first,
    )


@pytest.mark.parametrize("first, last", [(0, 4), (1, 2), (4, 4)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_experts_equal_a_float64_loop_beyond_the_limits(first: int, last: int, dtype: torch.dtype) -> None:
    given = expert_inputs(tokens=29)
    given["ids"][3] = -1
    given["weights"][3] = NAN
    x = given["x"].to(dtype)
    expected, seen = brute_experts(given, x, first, last)
    for half, name in ((seen[:, :INNER], "gate"), (seen[:, INNER:], "up")):
        assert half.max() > LIMIT + 1 and half.min() < -LIMIT - 1, f"{name} must pass both limits"
    got = run_experts(given, x, first, last)
    rtol, atol = TOLERANCE[dtype]
    assert got.dtype == dtype and not got[3].any()
    torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=50 * atol)


def test_ranks_add_up_to_all_experts() -> None:
    given = expert_inputs(tokens=11)
    x = given["x"].double()
    parts = [run_experts(given, x, first, last) for first, last in ((0, 1), (2, 2), (3, 4))]
    assert all(part.any() for part in parts)
    torch.testing.assert_close(sum(parts), run_experts(given, x, 0, EXPERTS - 1), rtol=1e-12, atol=1e-12)


def test_a_rank_without_tokens_gives_zeros_and_reads_no_weight() -> None:
    given = expert_inputs(tokens=6)
    given["ids"] %= 2
    given["w13_scale"][2:] = 255
    given["w2_scale"][2:] = 255
    assert not run_experts(given, given["x"], 2, 4).any()
    assert run_experts(given, given["x"], 0, 4).isfinite().all()
