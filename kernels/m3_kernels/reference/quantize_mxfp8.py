"""Quantise to the MXFP8 format."""

from __future__ import annotations

import torch
from torch import Tensor

VALUES_PER_SCALE = 32
"""Consecutive values along K that share one scale (the block size of the OCP MX formats)."""

SCALE_OF_NAN = 255
"""The scale byte that makes its 32 values NaN."""


def quantize_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """The E4M3 values and shared power-of-two scales of `x`, per 32 consecutive values along K.

    Args:
        x: `[..., K]` bfloat16, float16 or float32, K a multiple of 32.

    Returns:
        `[..., K]` float8_e4m3fn and `[..., K // 32]` uint8 (UE8M0: byte s stands for 2 ** (s - 127)).

    The scale is the smallest power of two with which the largest magnitude of the 32 values fits into E4M3,
    2 ** ceil(log2(amax / 448)), so nothing saturates; but the byte is at least 1 (2 ** -126, float32's
    smallest normal number) unless all 32 values are zero, which gives 0. Each value is divided by the scale,
    exactly, and rounded once, to nearest even; zeros keep their signs. (From 31 * 2 ** 123 on, that is up to
    2 ** 128, which float32 and bfloat16 do not hold.) If one of the 32 values is infinite or NaN, the byte is
    255 and all 32 are NaN. No host synchronisation.

    Raises:
        ValueError: another dtype, or K not a multiple of 32.

    Source: OCP Microscaling Formats 1.0, section 6.3, whose suggested scale, 2 ** floor(log2(amax)) / 256,
    would saturate magnitudes between 448 and 512 times the scale. Rounding up instead is what SGLang does
    (`mxfp8_group_quantize`: the same bytes, where amax is at least 2 ** -140 or zero), and NVIDIA's ModelOpt
    and Transformer Engine.
    """
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"MXFP8 quantises bfloat16, float16 and float32, not {x.dtype}")
    if x.shape[-1] % VALUES_PER_SCALE:
        raise ValueError(f"K must be a multiple of {VALUES_PER_SCALE}, got shape {tuple(x.shape)}")
    groups = x.unflatten(-1, (x.shape[-1] // VALUES_PER_SCALE, VALUES_PER_SCALE))
    amax = groups.abs().amax(-1).float()
    # Adding 0x1FFFFF carries into the exponent field just where the significand exceeds 1.75, that of 448.
    exponent = ((amax.view(torch.int32) + 0x1FFFFF) >> 23) - 8
    exponent = torch.where(amax == 0, 0, exponent.clamp(min=1))
    invalid = ~amax.isfinite()
    inverse = ((254 - exponent) << 23).view(torch.float32)
    values = (groups.float() * inverse[..., None]).masked_fill_(invalid[..., None], float("nan"))
    scale = exponent.masked_fill(invalid, SCALE_OF_NAN).to(torch.uint8)
    return values.flatten(-2).to(torch.float8_e4m3fn), scale
