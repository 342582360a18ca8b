"""The places where SGLang has no registry: what is hooked, and by what."""

from __future__ import annotations

import multiprocessing

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_m3 import admission, hardware, ports
from sglang_m3.attention import metrics, pool, workspace, wrapper
from sglang_m3.config import merge
from sglang_m3.experts import tuned
from sglang_m3.models import register as models
from sglang_m3.models import updates
from sglang_m3.parsing import replies, requests, tool_choice
from sglang_m3.platforms import cpu_experts, cpu_pool
from sglang_m3.quantization import dummy
from sglang_m3.speculation import chain

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"

EVERYWHERE = (
    (
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
        wrapper.wrap_attention_backend,
        HookType.AROUND,
    ),
    ("sglang.srt.mem_cache.memory_pool.MiniMaxSparseKVPool", pool.M3KVPool, HookType.REPLACE),
    (
        "sglang.srt.model_loader.utils.get_model_architecture",
        models.around_get_model_architecture,
        HookType.AROUND,
    ),
    (f"{_UPDATER}.update_weights_from_disk", updates.around_update_from_disk, HookType.AROUND),
    (f"{_UPDATER}.update_weights_from_tensor", updates.around_update_from_tensor, HookType.AROUND),
    (f"{_REPORTER}.report_decode_stats", metrics.around_decode_report, HookType.AROUND),
    (f"{_REPORTER}._maybe_log_idle_metrics", metrics.after_idle_report, HookType.AFTER),
    (
        "sglang.srt.model_loader.weight_utils.initialize_dummy_weights",
        dummy.around_initialize_dummy_weights,
        HookType.AROUND,
    ),
    *replies.HOOKS,
    *requests.HOOKS,
    *tool_choice.HOOKS,
    *admission.HOOKS,
    ("sglang.srt.utils.hf_transformers.config.get_config", merge.around_get_config, HookType.AROUND),
    ("sglang.srt.configs.model_config.ModelConfig.__init__", merge.around_model_config, HookType.AROUND),
)
"""(target, hook, type). Each acts for M3 models only."""

INDEX_DTYPE = (pool.around_index_dtype, HookType.AROUND)
"""SGLang's two callers, of the pool and of its budget, have imported the function by name."""

ON_HOPPER = (
    (
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        workspace.around_profile_available_bytes,
        HookType.AROUND,
    ),
    (
        "sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus.batch_get",
        chain.around_batch_get,
        HookType.AROUND,
    ),
    ("sglang.srt.mem_cache.kv_cache_configurator.get_minimax_sparse_index_dtype", *INDEX_DTYPE),
    ("sglang.srt.model_executor.pool_configurator.get_minimax_sparse_index_dtype", *INDEX_DTYPE),
    *tuned.HOOKS,
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
    # Only the process that was started by the user listens, and its target's module is slow to import.
    listening = ports.HOOKS + admission.LISTENING if multiprocessing.parent_process() is None else ()
    return EVERYWHERE + listening + (WITHOUT_GPU if hardware.target() == "cpu" else ON_HOPPER)


def register() -> None:
    """Register the hooks; SGLang applies them after all plugins have registered."""
    for target, hook, hook_type in _active():
        HookRegistry.register(target, hook, hook_type)


def unapplied() -> list[str]:
    """Targets whose hook SGLang failed to apply, which it only logs."""
    return [target for target, _, _ in _active() if target not in HookRegistry._patched]
