"""MXFP8 weights as bfloat16 on sm90, for products of so many tokens that writing them once costs little."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from m3_kernels.triton.sm90_common import early_launch
from m3_kernels.triton.sm90_mxfp8_common import EARLY, check_weight


def dequantize_mxfp8(weight: Tensor, scale: Tensor) -> Tensor:
    """`[N, K]` E4M3 and `[N, K // 32]` scale bytes -> `[N, K]` bfloat16.

    Contract: `m3_kernels.reference.dequantize_mxfp8`; exact from bfloat16's smallest normal number up. Weight
    and scale must be older than the launch before this one on the stream, which may still run when they are
    read.
    """
    check_weight(weight, scale)
    out = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
    block = 4096
    _dequantize_kernel[(triton.cdiv(weight.numel(), block),)](
        weight, scale, out, weight.numel(), VALUES=block, num_warps=8, **early_launch(True)
    )
    return out


@triton.jit
def _dequantize_kernel(weight, scale, out, values, VALUES: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * VALUES
    at = begin + tl.arange(0, VALUES)
    group = begin // 32 + tl.arange(0, VALUES // 32)
    numbers = tl.load(weight + at, mask=at < values, other=0.0).to(tl.float32)
    exponent = tl.load(scale + group, mask=group < values // 32, other=0).to(tl.int32)
    bits = tl.where(exponent == 0, 1 << 22, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
    factor = bits.to(tl.float32, bitcast=True)
    numbers = tl.reshape(tl.reshape(numbers, (VALUES // 32, 32)) * factor[:, None], (VALUES,))
    if EARLY:
        # Nothing before this launch writes weights, but something may still read what `out` was before.
        gdc_wait()
        gdc_launch_dependents()
    tl.store(out + at, numbers.to(tl.bfloat16), mask=at < values)
