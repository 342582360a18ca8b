"""The public operators: the reference, wherever no kernel exists for the device."""

from m3_kernels.reference.attend_blocks import attend_blocks
from m3_kernels.reference.choose_blocks import choose_blocks
from m3_kernels.reference.plan_prefix import plan_prefix
from m3_kernels.reference.score_blocks import score_blocks
from m3_kernels.reference.select_blocks import select_blocks
from m3_kernels.reference.store_tokens import store_tokens

__all__ = [
    "attend_blocks",
    "choose_blocks",
    "plan_prefix",
    "score_blocks",
    "select_blocks",
    "store_tokens",
]
