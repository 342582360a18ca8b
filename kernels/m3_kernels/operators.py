"""The public operators: the kernel for sm90 where the tensors are on a GPU, the reference elsewhere."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from m3_kernels.reference.dequantize_mxfp8 import dequantize_mxfp8 as dequantize_mxfp8
from m3_kernels.reference.quantize_mxfp8 import quantize_mxfp8 as quantize_mxfp8


def _by_device(name: str) -> Callable[..., Any]:
    """The operator `name`, picking its implementation by the device of its first argument.

    Triton is imported with the first call on a GPU.
    """
    reference = getattr(importlib.import_module(f"m3_kernels.reference.{name}"), name)

    @functools.cache
    def kernel() -> Callable[..., Any]:
        return getattr(importlib.import_module(f"m3_kernels.triton.sm90_{name}"), name)

    @functools.wraps(reference)
    def operator(first: Any, *args: Any, **kwargs: Any) -> Any:
        return (kernel() if first.is_cuda else reference)(first, *args, **kwargs)

    return operator


plan_prefix = _by_device("plan_prefix")
score_blocks = _by_device("score_blocks")
select_blocks = _by_device("select_blocks")
choose_blocks = _by_device("choose_blocks")
attend_blocks = _by_device("attend_blocks")
store_tokens = _by_device("store_tokens")
mxfp8_linear = _by_device("mxfp8_linear")
mxfp8_experts = _by_device("mxfp8_experts")
