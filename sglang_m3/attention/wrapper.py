"""Put the plugin's backend where SGLang would build its own for M3's sparse layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.attention.minimax_sparse_backend import MiniMaxHybridAttnBackend

from sglang_m3 import hardware, hooks
from sglang_m3.attention.backend import M3SparseBackend
from sglang_m3.attention.hybrid import M3HybridBackend
from sglang_m3.attention.parameters import serves


def wrap_attention_backend(original: Callable[..., Any], runner: Any, full_attn_backend: Any) -> Any:
    """Around `attn_backend_wrapper`: sparse layers get the plugin's backend; dense ones keep the chosen one,
    on Hopper where `M3HybridBackend` says.

    What the plugin does not serve, start-up has refused or left to SGLang (`overrides.SERVED_BY_SGLANG`).

    Raises:
        RuntimeError: SGLang failed to apply one of the plugin's hooks, which it only logs.
    """
    config = runner.model_config
    if not serves(config):
        return original(runner, full_attn_backend)
    unapplied = hooks.unapplied()
    if unapplied:
        raise RuntimeError(
            f"SGLang did not apply sglang-m3's hooks on {', '.join(unapplied)}; see the log above"
        )
    sparse = M3SparseBackend(runner)
    if hardware.target() != "sm90":
        # Without a GPU the reference would serve dense layers more slowly than PyTorch's own attention.
        return MiniMaxHybridAttnBackend(full_attn_backend, sparse, sparse.sparse_layer_ids)
    hybrid = M3HybridBackend(full_attn_backend, sparse, sparse.sparse_layer_ids)
    hybrid.capture_whole(runner.model)
    return hybrid
