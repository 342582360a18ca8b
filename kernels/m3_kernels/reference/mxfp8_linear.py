"""Multiply by an MXFP8 weight."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from m3_kernels.reference.dequantize_mxfp8 import dequantize_mxfp8


def mxfp8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """`x` times the transpose of the weight's exact numbers; activations are not quantised.

    Args:
        x: `[M, K]` bfloat16 (or float32, float64), M may be 0.
        weight: `[N, K]` float8_e4m3fn, K a multiple of 32.
        scale: `[N, K // 32]` uint8; a byte of 255 makes its output column NaN.

    Returns:
        `[M, N]` in `x`'s dtype: float32 accumulation (float64 where `x` is float64), one rounding.

    Raises:
        ValueError: `dequantize_mxfp8` refuses the weight.
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    return functional.linear(x.to(compute), dequantize_mxfp8(weight, scale, compute)).to(x.dtype)
