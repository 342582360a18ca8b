"""Every SGLang symbol that the plugin subclasses, hooks or calls against its contract.

SGLang promises none of them, so they are looked up, with the parameters relied on, before anything is
registered: a release that moved one stops M3 servers with its name instead of changing results.
"""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import dataclass
from typing import Any

PINNED_SGLANG = "0.5.23"


@dataclass(frozen=True)
class Symbol:
    """One symbol of SGLang.

    Attributes:
        path: dotted path.
        used_for: what the plugin needs it for.
        parameters: names that the callable must accept.
    """

    path: str
    used_for: str
    parameters: tuple[str, ...] = ()


_REASONING = "sglang.srt.parser.reasoning_parser"
_CALLS = "sglang.srt.function_call"

SYMBOLS = (
    Symbol(
        "sglang.srt.arg_groups.model_override_base.register_model_override",
        "page size 128 and the start-up checks",
        ("architecture",),
    ),
    Symbol("sglang.srt.arg_groups.model_override_base.resolving_view", "reading resolved server arguments"),
    Symbol(
        "sglang.srt.plugins.hook_registry.HookRegistry.register", "hooks", ("target", "hook", "hook_type")
    ),
    Symbol("sglang.srt.plugins.hook_registry.HookRegistry._patched", "checking that hooks were applied"),
    Symbol("sglang.srt.plugins.hook_registry.HookType.AROUND", "hooks"),
    Symbol("sglang.srt.plugins.hook_registry.HookType.AFTER", "hooks"),
    Symbol("sglang.srt.plugins.hook_registry.HookType.REPLACE", "hooks"),
    Symbol(
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
        "putting the plugin's attention backend in place",
        ("runner", "full_attn_backend"),
    ),
    Symbol("sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward", "attention backend"),
    Symbol(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_cuda_graph_state",
        "attention backend",
        ("max_bs", "max_num_tokens"),
    ),
    Symbol(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.get_cuda_graph_seq_len_fill_value",
        "attention backend",
    ),
    Symbol(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata_out_graph",
        "attention backend",
        ("forward_batch", "in_capture"),
    ),
    Symbol(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata_in_graph",
        "attention backend",
        ("forward_batch",),
    ),
    Symbol(
        "sglang.srt.layers.attention.minimax_sparse_backend.MiniMaxHybridAttnBackend",
        "routing dense and sparse layers",
        ("dense_backend", "sparse_backend", "sparse_layer_ids"),
    ),
    Symbol("sglang.srt.configs.model_config.is_minimax_sparse", "recognising M3"),
    Symbol(
        "sglang.srt.configs.model_config.get_minimax_sparse_attention_config", "block selection parameters"
    ),
    Symbol("sglang.srt.configs.model_config.get_minimax_sparse_layer_ids", "which layers are sparse"),
    Symbol(
        "sglang.srt.configs.model_config.get_minimax_sparse_disable_value_layer_ids", "refusing index values"
    ),
    Symbol("sglang.srt.configs.model_config.get_minimax_sparse_score_type", "refusing other score types"),
    Symbol("sglang.srt.mem_cache.memory_pool.MiniMaxSparseKVPool", "KV and index key pool"),
    Symbol(
        "sglang.srt.mem_cache.memory_pool.MiniMaxSparseKVPool.set_fused_kv_index_buffer",
        "storing tokens",
        (
            "layer",
            "loc",
            "cache_k",
            "cache_v",
            "cache_idx_k",
            "cache_idx_v",
            "k_scale",
            "v_scale",
            "idx_k_scale",
        ),
    ),
    Symbol(
        "sglang.srt.mem_cache.memory_pool.MiniMaxSparseKVPool.get_kv_buffer", "reading pages", ("layer_id",)
    ),
    Symbol(
        "sglang.srt.mem_cache.memory_pool.MiniMaxSparseKVPool.get_index_k_buffer",
        "reading pages",
        ("layer_id",),
    ),
    Symbol(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        "keeping the operators' workspace inside the memory budget",
        ("pre_model_load_memory",),
    ),
    Symbol("sglang.srt.runtime_context.get_parallel", "heads per rank"),
    Symbol(
        "sglang.srt.mem_cache.kv_cache_configurator.reject_out_of_tree_path",
        "building M3's pool on the CPU platform",
        ("platform", "subsystem"),
    ),
    Symbol(
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
        "the experts' activation without a GPU",
        ("layer", "x", "topk_output", "moe_runner_config"),
    ),
    Symbol("sglang.srt.layers.moe.moe_runner.MoeRunnerConfig.gate_up_interleaved", "the experts' activation"),
    Symbol(
        "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_decode_stats",
        "selection counters in the log and the metrics",
    ),
    Symbol(
        "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter._maybe_log_idle_metrics",
        "selection counters in the metrics",
    ),
    Symbol(f"{_REASONING}.ReasoningParser.DetectorMap", "the reasoning parser minimax-m3"),
    Symbol(
        f"{_REASONING}.BaseReasoningFormatDetector.__init__",
        "the reasoning parser minimax-m3",
        ("stream_reasoning", "force_reasoning", "continue_final_message", "previous_content"),
    ),
    Symbol(
        f"{_REASONING}.BaseReasoningFormatDetector._maybe_apply_force_nonempty_content",
        "the reasoning parser minimax-m3",
    ),
    Symbol(f"{_REASONING}.StreamingParseResult", "the reasoning parser minimax-m3"),
    Symbol(
        "sglang.srt.function_call.function_call_parser.FunctionCallParser.ToolCallParserEnum",
        "the tool call parser minimax-m3",
    ),
    Symbol(f"{_CALLS}.base_format_detector.BaseFormatDetector.finish", "the tool call parser minimax-m3"),
    Symbol(
        f"{_CALLS}.base_format_detector.BaseFormatDetector.get_structural_tag",
        "enforcing tool calls while generating",
    ),
    Symbol(f"{_CALLS}.core_types.StreamingParseResult", "the tool call parser minimax-m3"),
    Symbol(f"{_CALLS}.core_types.ToolCallItem", "the tool call parser minimax-m3"),
    Symbol(f"{_CALLS}.core_types._GetInfoFunc", "the tool call parser minimax-m3"),
    Symbol("sglang.srt.entrypoints.openai.protocol.Tool", "the tool call parser minimax-m3"),
    Symbol(
        "sglang.srt.entrypoints.openai.protocol.ChatCompletionRequest", "thinking in the Messages endpoint"
    ),
    Symbol(
        "sglang.srt.entrypoints.anthropic.protocol.AnthropicMessagesRequest",
        "thinking in the Messages endpoint",
    ),
    Symbol(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._convert_to_chat_completion_request",
        "thinking in the Messages endpoint",
        ("anthropic_request",),
    ),
    Symbol(
        "sglang.srt.entrypoints.openai.serving_chat._validate_minimax_m3_request",
        "refusing unknown reasoning efforts",
    ),
    Symbol("sglang.srt.configs.model_config.ModelConfig", "stopping M3 servers"),
    Symbol("sglang.srt.entrypoints.openai.protocol.ToolChoice", "enforcing tool calls while generating"),
    Symbol("sglang.srt.environ.envs.SGLANG_FORWARD_UNKNOWN_TOOLS", "calls of undeclared functions"),
    Symbol("sglang.srt.platforms.interface.SRTPlatform", "the CPU platform"),
    Symbol("sglang.srt.platforms.interface.SRTPlatform.get_dispatch_key_name", "the CPU platform"),
    Symbol("sglang.srt.platforms.interface.SRTPlatform.get_default_attention_backend", "the CPU platform"),
    Symbol("sglang.srt.platforms.interface.SRTPlatform.post_load_model", "images in float32", ("model",)),
    Symbol(
        "sglang.srt.arg_groups.model_overrides.minimax_m3._resolve_quant_method",
        "refusing a checkpoint's quantisation",
        ("hf_config",),
    ),
    Symbol("sglang.srt.layers.radix_attention.RadixAttention", "attention backend"),
    Symbol("sglang.srt.model_executor.forward_batch_info.ForwardBatch", "attention backend"),
    Symbol("sglang.srt.platforms.interface.PlatformCapabilities", "the CPU platform"),
    Symbol("sglang.srt.platforms.cpu.CpuDeviceMixin", "the CPU platform"),
    Symbol("sglang.srt.platforms.device_mixin.PlatformEnum.OOT", "the CPU platform"),
    Symbol("sglang.srt.environ.envs.SGLANG_OPT_USE_BF16_ROUTER_GEMM", "the router without a GPU"),
)


class MovedSymbolError(RuntimeError):
    """SGLang no longer has something that the plugin relies on."""


def resolve(path: str) -> Any:
    """The object at a dotted path.

    Raises:
        ImportError, AttributeError: it is not there.
    """
    return pkgutil.resolve_name(path)


def problems(symbols: tuple[Symbol, ...] = SYMBOLS) -> list[str]:
    """What is missing or has changed, one line each; empty when all is well."""
    found = []
    for symbol in symbols:
        try:
            value = resolve(symbol.path)
        except (ImportError, AttributeError):
            found.append(f"{symbol.path} is gone ({symbol.used_for})")
            continue
        if symbol.parameters:
            accepted = inspect.signature(value).parameters
            lost = [name for name in symbol.parameters if name not in accepted]
            if lost:
                found.append(f"{symbol.path} no longer takes {', '.join(lost)} ({symbol.used_for})")
    return found


def check() -> None:
    """Raise `MovedSymbolError` naming every symbol that moved."""
    found = problems()
    if found:
        import sglang

        raise MovedSymbolError(
            f"SGLang {sglang.__version__} is installed, sglang-m3 is made for {PINNED_SGLANG}, and "
            + "; ".join(found)
            + f"; install sglang=={PINNED_SGLANG}"
        )
