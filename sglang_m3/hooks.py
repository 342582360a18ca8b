"""The places where SGLang has no registry: what is hooked, and by what."""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_m3 import hardware
from sglang_m3.attention import metrics, pool, workspace, wrapper
from sglang_m3.parsing import requests
from sglang_m3.platforms import cpu_experts, cpu_pool

_REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"

EVERYWHERE = (
    (
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
        wrapper.wrap_attention_backend,
        HookType.AROUND,
    ),
    ("sglang.srt.mem_cache.memory_pool.MiniMaxSparseKVPool", pool.M3KVPool, HookType.REPLACE),
    (f"{_REPORTER}.report_decode_stats", metrics.around_decode_report, HookType.AROUND),
    (f"{_REPORTER}._maybe_log_idle_metrics", metrics.after_idle_report, HookType.AFTER),
    *requests.HOOKS,
)
"""(target, hook, type). Each acts for M3 models only."""

ON_HOPPER = (
    (
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        workspace.around_profile_available_bytes,
        HookType.AROUND,
    ),
)

WITHOUT_GPU = (
    (
        "sglang.srt.mem_cache.kv_cache_configurator.reject_out_of_tree_path",
        cpu_pool.around_reject_out_of_tree_path,
        HookType.AROUND,
    ),
    (
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
        cpu_experts.around_moe_forward_native,
        HookType.AROUND,
    ),
)


def _active() -> tuple[tuple[str, object, HookType], ...]:
    return EVERYWHERE + (WITHOUT_GPU if hardware.target() == "cpu" else ON_HOPPER)


def register() -> None:
    """Register the hooks; SGLang applies them after all plugins have registered."""
    for target, hook, hook_type in _active():
        HookRegistry.register(target, hook, hook_type)


def unapplied() -> list[str]:
    """Targets whose hook SGLang failed to apply, which it only logs."""
    return [target for target, _, _ in _active() if target not in HookRegistry._patched]
