"""Dequantise the MXFP8 format."""

from __future__ import annotations

import torch
from torch import Tensor

from m3_kernels.reference.quantize_mxfp8 import SCALE_OF_NAN, VALUES_PER_SCALE


def dequantize_mxfp8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that an MXFP8 tensor stands for: value * 2 ** (scale - 127).

    Args:
        weight: `[..., K]` float8_e4m3fn, K a multiple of 32.
        scale: `[..., K // 32]` uint8; 255 makes its 32 values NaN.
        dtype: of the result.

    Returns:
        `[..., K]` in `dtype`: the product itself where `dtype` holds it, which float64 always does, float32
        below 2 ** 128, and bfloat16 below 2 ** 128 and from its smallest normal number up; else rounded once,
        to nearest even, to infinity beyond the largest number. No host synchronisation.

    Raises:
        ValueError: a dtype or shape other than above.
    """
    if weight.dtype != torch.float8_e4m3fn or scale.dtype != torch.uint8:
        raise ValueError(f"MXFP8 is float8_e4m3fn with uint8 scales, not {weight.dtype} with {scale.dtype}")
    count, remainder = divmod(weight.shape[-1], VALUES_PER_SCALE)
    if remainder or scale.shape != (*weight.shape[:-1], count):
        raise ValueError(
            f"MXFP8 has one scale per {VALUES_PER_SCALE} values along K, not weight {tuple(weight.shape)} "
            f"with scale {tuple(scale.shape)}"
        )
    # float32 holds every product below its overflow: the smallest is 2 ** -136, and all are multiples of it.
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    groups = weight.to(compute).unflatten(-1, (count, VALUES_PER_SCALE))
    return groups.mul_(_power_of_two(scale)[..., None]).flatten(-2).to(dtype)


def _power_of_two(scale: Tensor) -> Tensor:
    """2 ** (scale - 127) in float32, NaN for 255."""
    bits = scale.to(torch.int32) << 23
    bits = torch.where(scale == 0, 1 << 22, bits)  # 2 ** -127 is subnormal
    return bits.view(torch.float32).masked_fill(scale == SCALE_OF_NAN, float("nan"))
