"""The operators of sparse attention with a prefix cache: one function each, one result on every device.

`reference/` specifies them in PyTorch, `triton/` has the kernels for sm90; the functions here pick by device.
"""

from m3_kernels.operators import (
    attend_blocks,
    choose_blocks,
    dequantize_mxfp8,
    mxfp8_experts,
    mxfp8_linear,
    plan_prefix,
    quantize_mxfp8,
    score_blocks,
    select_blocks,
    store_tokens,
)
from m3_kernels.prefix_plan import PrefixPlan
from m3_kernels.rows import BLOCK_TOKENS, Rows

__all__ = [
    "BLOCK_TOKENS",
    "PrefixPlan",
    "Rows",
    "attend_blocks",
    "choose_blocks",
    "dequantize_mxfp8",
    "mxfp8_experts",
    "mxfp8_linear",
    "plan_prefix",
    "quantize_mxfp8",
    "score_blocks",
    "select_blocks",
    "store_tokens",
]
