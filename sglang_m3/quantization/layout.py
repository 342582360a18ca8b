"""How MXFP8 weights stay in memory, and with which products: the setting `SGLANG_M3_MXFP8`.

`exact` keeps the checkpoint's bytes and multiplies by their exact numbers. `fast` gives 128 x 128 values one
scale (`m3_kernels.reference.coarsen_mxfp8`), still MXFP8, so that many tokens can go through DeepGEMM's FP8
products, with activations in E4M3; few tokens use the same kernels as in `exact`, which are faster there.
"""

from __future__ import annotations

import functools
import logging
from typing import Literal

import torch
from m3_kernels.reference.coarsen_mxfp8 import BLOCK, Coarsening, block_scales, coarsen_mxfp8
from sglang.srt.layers.moe import get_moe_runner_backend
from torch import Tensor
from torch.nn import Module, Parameter

from sglang_m3 import hardware, settings
from sglang_m3.quantization.loading import WeightFormatError

logger = logging.getLogger(__name__)

Layout = Literal["exact", "fast"]

LINEAR_TOKENS = 64
"""With more tokens a linear's product goes through DeepGEMM in `fast`, its activations rounded to E4M3."""

SLOW_ROWS, SLOW_TOKENS = 1536, range(513, 8192)
"""Rows of the joint q, k, v and index projection on a rank of eight. With 2,048 tokens DeepGEMM took 123 us
for them and the weight as bfloat16 59, with 256 tokens 12 and 22, with 8,192 tokens 161 and 228. Other widths
gain by DeepGEMM."""

TOKENS_PER_EXPERT = 2
"""Likewise for the experts' products, in tokens per expert if all were equally likely."""

LARGEST_SCALE = 198
"""Scale byte up to which the kernels for sm90 multiply exactly (`m3_kernels.triton.sm90_mxfp8_common`)."""

VALUES_AT_A_TIME = 1 << 20
"""Values looked at together while loading, few beside a rank's weights."""


@functools.cache
def layout() -> Layout:
    """The layout of this process, logged once.

    `auto` is `fast` for `--moe-runner-backend deep_gemm` where DeepGEMM is there, and `exact` otherwise: FP8
    activations are an approximation, which has to be asked for by name.
    """
    asked = settings.read().mxfp8
    by_runner = has_deep_gemm() and get_moe_runner_backend().is_deep_gemm()
    named = asked == "fast" or (asked == "auto" and by_runner)
    chosen: Layout = "fast" if named else "exact"
    reason = {
        "exact": "the checkpoint's bytes, multiplied by their exact numbers",
        "fast": "one scale per 128 x 128 values, and many tokens through DeepGEMM with FP8 activations",
    }[chosen]
    logger.info("sglang-m3: MXFP8 weights are kept %s (SGLANG_M3_MXFP8=%s): %s", chosen, asked, reason)
    return chosen


def takes_deep_gemm(tokens: int, rows: int) -> bool:
    """Whether in `fast` a linear of so many rows multiplies so many tokens through DeepGEMM."""
    return tokens > LINEAR_TOKENS and not (rows == SLOW_ROWS and tokens in SLOW_TOKENS)


def has_deep_gemm() -> bool:
    """Whether SGLang can use DeepGEMM on this GPU."""
    if hardware.target() != "sm90":
        return False
    from sglang.srt.layers.deep_gemm_wrapper import ENABLE_JIT_DEEPGEMM

    return ENABLE_JIT_DEEPGEMM


def coarsen(layer: Module, name: str, scale_name: str, label: str) -> Tensor | None:
    """In `fast`, give the layer's weight `[..., N, K]` coarse scales in place.

    Weights that blocks of 128 x 128 do not divide stay as they are. Logs how much changed.

    Returns:
        `[..., N // 128, K // 128]` float32, the blocks' scales, or None where nothing was done.
    """
    weight, scale = layer.get_parameter(name), layer.get_parameter(scale_name)
    if layout() == "exact" or weight.shape[-2] % BLOCK or weight.shape[-1] % BLOCK:
        return None
    matrices = [(weight.data, scale.data)] if weight.dim() == 2 else list(zip(weight.data, scale.data))
    results = [coarsen_mxfp8(*matrix) for matrix in matrices]
    _report(label, results)
    return block_scales(scale.data)


def renew(before: Tensor | None, scales: Tensor | None) -> Tensor | None:
    """`scales`, after a weight update in the tensor that held them before: captured graphs read it there."""
    if before is None or scales is None:
        return scales
    return before.copy_(scales)


def _report(label: str, results: list[Coarsening]) -> None:
    values = sum(result.values for result in results)
    changed = sum(result.changed for result in results)
    error = max(result.relative_error for result in results)
    logger.info(
        "%s: %d of %d values changed (%.4f%%), relative error %.2e",
        label,
        changed,
        values,
        100 * changed / values,
        error,
    )


def check_numbers(weight: Parameter, scale: Parameter, label: str) -> None:
    """Refuse what the kernels for sm90 do not multiply as the format says.

    Raises:
        WeightFormatError: a value is E4M3's NaN, or a scale is NaN or above 2 ** 71 (byte 198).
    """
    flat = weight.data.view(torch.uint8).flatten()
    found = [((part & 0x7F) == 0x7F).any() for part in flat.split(VALUES_AT_A_TIME)]
    if torch.stack(found).any():
        raise WeightFormatError(f"{label}: a value is NaN")
    if (scale > LARGEST_SCALE).any():
        raise WeightFormatError(f"{label}: a scale is NaN or above 2 ** {LARGEST_SCALE - 127}")
