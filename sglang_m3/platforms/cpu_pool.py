"""Admit M3's KV pool on the CPU platform."""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.platforms.interface import SRTPlatform

from sglang_m3.platforms.cpu import M3CpuPlatform

M3_POOL_SUBSYSTEM = "the MiniMax sparse-index KV pool"
"""How `KVCacheConfigurator` names the pool when it asks whether the platform may have it."""


def around_reject_out_of_tree_path(
    original: Callable[..., None], platform: SRTPlatform, *, subsystem: str
) -> None:
    """Around `reject_out_of_tree_path`: M3's pool needs no CUDA; every other subsystem is as before."""
    if isinstance(platform, M3CpuPlatform) and subsystem == M3_POOL_SUBSYSTEM:
        return
    original(platform, subsystem=subsystem)
