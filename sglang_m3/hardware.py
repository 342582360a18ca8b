"""What this process runs on, as far as the plugin cares."""

from __future__ import annotations

import functools
import os
from typing import Literal

import torch

Target = Literal["sm90", "cpu"]


@functools.cache
def target() -> Target | None:
    """`"sm90"` on Hopper GPUs, `"cpu"` without any accelerator, else None: SGLang is then left alone.

    With `SGLANG_USE_CPU_ENGINE=1` the user asks for SGLang's own CPU engine, so None as well.
    """
    if torch.cuda.is_available():
        if torch.version.hip is not None or getattr(torch.version, "musa", None) is not None:
            return None
        return "sm90" if torch.cuda.get_device_capability(0) == (9, 0) else None
    others = ("xpu", "npu", "mps", "musa")
    if sglang_cpu_engine_is_asked_for():
        return None
    if any(getattr(torch, name, None) is not None and getattr(torch, name).is_available() for name in others):
        return None
    return "cpu"


def sglang_cpu_engine_is_asked_for() -> bool:
    """Whether the user chose SGLang's own CPU build, which the plugin must not displace."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE", "0").lower() in ("1", "true", "yes")
