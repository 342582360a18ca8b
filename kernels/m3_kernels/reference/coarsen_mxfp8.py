"""Re-express an MXFP8 weight so that blocks of 128 x 128 values share one scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m3_kernels.reference.quantize_mxfp8 import SCALE_OF_NAN, VALUES_PER_SCALE

BLOCK = 128
"""Rows and columns of a block."""


@dataclass(frozen=True)
class Coarsening:
    """What a re-expression changed.

    Attributes:
        values: elements of the weight.
        changed: of them, those that now stand for another number.
        relative_error: root of the mean squared error, relative to the weight's.
    """

    values: int
    changed: int
    relative_error: float


def coarsen_mxfp8(weight: Tensor, scale: Tensor) -> Coarsening:
    """Give each block of 128 x 128 the largest of its scales, in place; values shrink by powers of two.

    A number stays itself unless it lands among E4M3's subnormal numbers or below, where it is rounded to
    nearest even; nothing grows, so nothing saturates. The result is MXFP8 as before, and doing it again
    changes nothing.

    Args:
        weight: `[N, K]` float8_e4m3fn, N and K multiples of 128.
        scale: `[N, K // 32]` uint8 without the byte 255.

    Raises:
        ValueError: another shape, or a NaN scale. Synchronises with the host.
    """
    rows, columns = weight.shape
    if rows % BLOCK or columns % BLOCK or scale.shape != (rows, columns // VALUES_PER_SCALE):
        raise ValueError(f"blocks of {BLOCK} x {BLOCK} do not divide {tuple(weight.shape)}")
    if (scale == SCALE_OF_NAN).any():
        raise ValueError("a scale is NaN")
    blocks = scale.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK // VALUES_PER_SCALE)
    largest = blocks.amax((1, 3), keepdim=True)
    shift = (largest.short() - blocks.short()).reshape(scale.shape)
    before = weight.float().unflatten(1, (-1, VALUES_PER_SCALE))
    after = torch.ldexp(before, -shift[..., None].int()).to(torch.float8_e4m3fn)
    # Compared under the old scales: powers of two, so exact wherever float32 holds the result.
    error = torch.ldexp(after.float(), shift[..., None].int().clamp(max=60)) - before
    unit = torch.exp2(scale.double() - 127)
    error_square = (error.double().square().sum(-1) * unit.square()).sum()
    square = (before.double().square().sum(-1) * unit.square()).sum()
    result = Coarsening(
        weight.numel(),
        int((error != 0).sum()),
        float((error_square / square).sqrt()) if square else 0.0,
    )
    weight.copy_(after.flatten(1))
    scale.view(blocks.shape).copy_(largest.expand(blocks.shape))
    return result


def block_scales(scale: Tensor) -> Tensor:
    """The scales of a coarsened weight's blocks.

    Args:
        scale: `[..., N, K // 32]` uint8, equal within blocks of 128 x 128.

    Returns:
        `[..., N // 128, K // 128]` float32, 2 ** (byte - 127).
    """
    bits = scale[..., ::BLOCK, :: BLOCK // VALUES_PER_SCALE].to(torch.int32) << 23
    return torch.where(bits == 0, 1 << 22, bits).view(torch.float32).contiguous()
