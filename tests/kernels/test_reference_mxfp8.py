"""Quantising to MXFP8 and back, against the format's definition in exact arithmetic."""

from __future__ import annotations

from bisect import bisect_left
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from m3_kernels.reference.dequantize_mxfp8 import dequantize_mxfp8
from m3_kernels.reference.quantize_mxfp8 import quantize_mxfp8
from torch import Tensor
from triton_kernels.numerics_details.mxfp import downcast_to_mxfp_torch

NAN, INF = float("nan"), float("inf")


def e4m3_value(code: int) -> Fraction | None:
    """The number behind an E4M3 byte without its sign, None for NaN."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 127 == 127:
        return None
    return (
        Fraction(mantissa, 512)
        if exponent == 0
        else Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)
    )


MAGNITUDES = [e4m3_value(code) for code in range(127)]
"""Ascending, by code."""


def nearest_code(magnitude: Fraction) -> int:
    """E4M3 code nearest to a magnitude up to 448, the even one of two."""
    above = bisect_left(MAGNITUDES, magnitude)
    if above == 0:
        return 0
    below = above - 1
    down, up = magnitude - MAGNITUDES[below], MAGNITUDES[above] - magnitude
    return below if down < up or (down == up and below % 2 == 0) else above


def brute_quantization(values: list[float]) -> tuple[list[int], int]:
    """E4M3 bytes and scale byte of 32 finite values, by trying every scale from the smallest."""
    amax = max(abs(Fraction(value)) for value in values)
    byte = 0
    if amax:
        byte = next(byte for byte in range(1, 255) if amax <= 448 * Fraction(2) ** (byte - 127))
    scale = Fraction(2) ** (byte - 127)
    signs = [128 * bool(np.signbit(value)) for value in values]
    return [s | nearest_code(abs(Fraction(v)) / scale) for s, v in zip(signs, values)], byte


def from_bits(bits: list[int], dtype: torch.dtype) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int16).view(dtype)


@st.composite
def blocks(draw: st.DrawFn) -> Tensor:
    """32 finite bfloat16 or float16 values: of any size, or near each other with many ties, or with zeros."""
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    mantissa_bits = 7 if dtype == torch.bfloat16 else 10
    largest = (1 << (15 - mantissa_bits)) - 2  # the exponent field of the largest finite number
    low = draw(st.integers(0, largest))
    high = draw(st.integers(low, min(largest, low + draw(st.sampled_from([0, 3, 16, 255])))))
    number = st.tuples(
        st.booleans(), st.integers(low, high), st.integers(0, (1 << mantissa_bits) - 1), st.integers(0, 5)
    )
    bits = [
        sign << 15 | ((exponent << mantissa_bits | mantissa) if drop else 0)
        for sign, exponent, mantissa, drop in draw(st.lists(number, min_size=32, max_size=32))
    ]
    return from_bits(bits, dtype)


@settings(max_examples=200, deadline=None)
@given(blocks())
def test_quantisation_equals_brute_force(block: Tensor) -> None:
    weight, scale = quantize_mxfp8(block[None])
    codes, byte = brute_quantization(block.double().tolist())
    assert scale.tolist() == [[byte]], f"{block.tolist()}"
    got = weight.view(torch.uint8)[0].tolist()
    wrong = [(v, g, c) for v, g, c in zip(block.tolist(), got, codes) if g != c]
    assert not wrong, f"scale {byte}, (value, got, expected): {wrong}"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32))
@example([448.0] + [0.0] * 31)
@example([float(np.nextafter(np.float32(448), np.float32(449)))] + [-0.0] * 31)
@example([float(np.finfo(np.float32).max)] + [1.0] * 31)
@example([float(np.finfo(np.float32).smallest_subnormal)] * 32)
@example([448 * 2.0**-126, 2.0**-136, 2.0**-135, -(2.0**-136)] * 8)
def test_float32_is_quantised_as_exactly(values: list[float]) -> None:
    weight, scale = quantize_mxfp8(torch.tensor(values)[None])
    codes, byte = brute_quantization(values)
    assert (weight.view(torch.uint8)[0].tolist(), scale.tolist()) == (codes, [[byte]])


@settings(max_examples=100, deadline=None)
@given(blocks())
def test_quantisation_is_monotone_bounded_and_idempotent(block: Tensor) -> None:
    weight, scale = quantize_mxfp8(block[None])
    numbers = dequantize_mxfp8(weight, scale, torch.float64)
    x = block.double()
    order = x.argsort()
    assert (numbers[0, order].diff() >= 0).all(), "a larger value became smaller"
    # Half a unit in the last place: 2 ** -4 of a normal number, 2 ** -10 scales below; scale < amax / 224.
    step = max(float(x.abs().max()) / 224, 2.0**-126)
    excess = (numbers[0] - x).abs() - torch.maximum(x.abs() / 16, torch.tensor(step / 1024).double())
    assert (excess <= 0).all(), f"error beyond the format's bound at {x[excess > 0].tolist()}"
    if x.abs().max() >= 2.0**128 * 31 / 32:
        return  # rounded up to 2 ** 128, which float32 does not hold
    again = dequantize_mxfp8(*quantize_mxfp8(numbers.float()), torch.float64)
    assert torch.equal(again, numbers), "what the format holds must survive a second quantisation"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_are_those_of_sglangs_quantiser(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    exponent = torch.randint(-130, 120, (301, 3), generator=generator).repeat_interleave(32, 1)
    x = torch.randn(301, 96, generator=generator).mul_(torch.exp2(exponent.double())).to(dtype)
    x[7] = 0
    x[8, :32] = torch.tensor([448.0, -448.0, 450.0, 7.0] * 8).to(dtype)
    weight, scale = quantize_mxfp8(x)
    theirs, their_scale = downcast_to_mxfp_torch(x, torch.float8_e4m3fn, 1)
    assert torch.equal(scale, their_scale)
    assert torch.equal(weight.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_infinity_and_nan_spoil_their_32_values_alone(bad: float) -> None:
    x = torch.ones(3, 96)
    x[1, 40] = bad
    weight, scale = quantize_mxfp8(x)
    numbers = dequantize_mxfp8(weight, scale, torch.float32)
    expected = torch.ones(3, 96)
    expected[1, 32:64] = NAN
    assert torch.equal(numbers.isnan(), expected.isnan()) and torch.equal(
        numbers.nan_to_num(7), expected.nan_to_num(7)
    )
    assert scale[1].tolist() == [119, 255, 119]
    assert (weight.view(torch.uint8)[1, 32:64] & 127 == 127).all(), "NaN whatever a reader makes of byte 255"


@pytest.mark.parametrize("leading", [(), (0,), (2, 3)])
def test_any_number_of_leading_dimensions(leading: tuple[int, ...]) -> None:
    x = torch.randn(*leading, 64, generator=torch.Generator().manual_seed(1))
    weight, scale = quantize_mxfp8(x)
    flat_weight, flat_scale = quantize_mxfp8(x.reshape(-1, 64))
    assert weight.shape == x.shape and scale.shape == (*leading, 2)
    assert torch.equal(weight.view(torch.uint8).reshape(-1, 64), flat_weight.view(torch.uint8))
    assert torch.equal(scale.reshape(-1, 2), flat_scale)


def bfloat16_of(numbers: np.ndarray) -> np.ndarray:
    """float64 rounded once to bfloat16, to nearest even, as float64; for numbers of few significant bits."""
    subnormal = np.abs(numbers) < 2.0**-126
    rounded = np.where(subnormal, np.rint(numbers * 2.0**133) * 2.0**-133, numbers)
    return np.where(np.abs(rounded) >= 2.0**128, np.copysign(INF, rounded), rounded)


def test_dequantisation_is_the_definition_for_every_byte_and_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    weight = codes.view(torch.float8_e4m3fn).repeat(256, 1)
    scale = codes[:, None].repeat(1, 8)
    magnitude = np.array([float(m) for m in MAGNITUDES] + [NAN])
    values = np.concatenate([magnitude, -magnitude])
    powers = np.array([2.0 ** (byte - 127) for byte in range(255)] + [NAN])
    exact = powers[:, None] * values
    with np.errstate(over="ignore"):
        single = exact.astype(np.float32).astype(np.float64)
    for dtype, expected in [
        (torch.float64, exact),
        (torch.float32, single),
        (torch.bfloat16, bfloat16_of(exact)),
    ]:
        got = dequantize_mxfp8(weight, scale, dtype)
        assert got.dtype == dtype
        got = got.double().numpy()
        np.testing.assert_array_equal(got, expected, err_msg=str(dtype))
        numbers = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(expected)[numbers])
    assert np.isnan(exact[255]).all() and np.isnan(exact[:, 127]).all()


E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    "weight, scale, complaint",
    [
        (torch.zeros(2, 64, dtype=E4M3), torch.zeros(2, 2), "float32"),
        (torch.zeros(2, 64), torch.zeros(2, 2, dtype=torch.uint8), "float32"),
        (torch.zeros(2, 64, dtype=E4M3), torch.zeros(2, 1, dtype=torch.uint8), "one scale per 32"),
        (torch.zeros(2, 64, dtype=E4M3), torch.zeros(1, 2, dtype=torch.uint8), "one scale per 32"),
        (torch.zeros(2, 40, dtype=E4M3), torch.zeros(2, 1, dtype=torch.uint8), "one scale per 32"),
    ],
)
def test_what_is_not_the_format_is_refused(weight: Tensor, scale: Tensor, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        dequantize_mxfp8(weight, scale, torch.float32)


@pytest.mark.parametrize(
    "x, complaint", [(torch.zeros(2, 40), "40"), (torch.zeros(2, 32).double(), "float64")]
)
def test_what_cannot_be_quantised_is_refused(x: Tensor, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        quantize_mxfp8(x)
