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
_EXPERTS = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"

_MODEL_FILE = (
    "sglang.kernels.ops.attention.minimax_qknorm_rope.minimax_qknorm_rope_grouped",
    "sglang.kernels.ops.gemm.tiny_gemm.can_use_tiny_gemm",
    "sglang.kernels.ops.gemm.tiny_gemm.tiny_gemm_bf16",
    "sglang.srt.eplb.expert_location.ModelConfigForExpertLocation",
    "sglang.srt.layers.aux_hidden_states.AuxHiddenStateList",
    "sglang.srt.layers.dp_attention.is_dp_attention_enabled",
    "sglang.srt.layers.layer_boundary.append_stages",
    "sglang.srt.layers.layer_boundary.declare_attn",
    "sglang.srt.layers.layer_boundary.declare_ffn",
    "sglang.srt.layers.layer_boundary.fusions.custom_all_reduce_fusion.CustomAllReduceFusion",
    "sglang.srt.layers.layer_boundary.is_dense_ffn_fully_dp",
    "sglang.srt.layers.layer_boundary.residual.batch.final_norm",
    "sglang.srt.layers.layer_boundary.residual.batch.start",
    "sglang.srt.layers.layer_boundary.residual.batch.to_pp",
    "sglang.srt.layers.layer_boundary.stage.StageBoundary.exit",
    "sglang.srt.layers.layer_boundary.stage.StageBoundary.finish",
    "sglang.srt.layers.layer_boundary.stage.StageBoundary.from_pp",
    "sglang.srt.layers.layer_boundary.stage.StageBoundary.prepare",
    "sglang.srt.layers.layernorm.GemmaRMSNorm",
    "sglang.srt.layers.linear.LinearParallelGroup",
    "sglang.srt.layers.linear.ReplicatedLinear",
    "sglang.srt.layers.linear.ReplicatedParallelGroup",
    "sglang.srt.layers.linear.RowParallelLinear",
    "sglang.srt.layers.logits_processor.LogitsProcessor",
    "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE",
    "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.swiglu_no_interleaved_with_alpha_and_limit",
    "sglang.srt.layers.moe.topk.TopK",
    "sglang.srt.layers.quantization.mxfp4_flashinfer_trtllm_moe.register_fused_all_reduce_comm",
    "sglang.srt.layers.rotary_embedding.get_rope",
    "sglang.srt.layers.utils.PPMissingLayer",
    "sglang.srt.layers.vocab_parallel_embedding.ParallelLMHead",
    "sglang.srt.layers.vocab_parallel_embedding.VocabParallelEmbedding",
    "sglang.srt.managers.mm_utils.general_mm_embed_routine",
    "sglang.srt.managers.mm_utils.pad_mm_tokens",
    "sglang.srt.managers.schedule_batch.MultimodalDataItem",
    "sglang.srt.managers.schedule_batch.MultimodalInputs",
    "sglang.srt.model_executor.forward_batch_info.PPProxyTensors",
    "sglang.srt.model_executor.runner.get_is_capture_mode",
    "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.is_in_breakable_cuda_graph",
    "sglang.srt.model_loader.weight_utils.default_weight_loader",
    "sglang.srt.models.minimax_vl_common.CLIPVisionConfig.from_dict",
    "sglang.srt.models.minimax_vl_common.MiniMaxVLVisionModel",
    "sglang.srt.models.minimax_vl_common.get_image_feature",
    "sglang.srt.models.minimax_vl_common.get_video_feature",
    "sglang.srt.models.utils.WeightsMapper",
    "sglang.srt.runtime_context.get_exec",
    "sglang.srt.runtime_context.get_mm",
    "sglang.srt.runtime_context.get_stream",
    "sglang.srt.utils.add_prefix",
    "sglang.srt.utils.make_pp_layers",
)

SYMBOLS = (
    Symbol(
        f"{_EXPERTS}.get_moe_configs",
        "tuned configurations of the experts",
        ("E", "N", "dtype", "block_n", "block_k", "per_channel_quant", "down_moe"),
    ),
    Symbol(
        f"{_EXPERTS}.get_config_file_name",
        "tuned configurations of the experts",
        ("E", "N", "dtype", "down_moe"),
    ),
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
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"
        ".use_captured_forward_metadata_for_breakable_cuda_graph",
        "prefill graphs",
    ),
    Symbol(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.prefill_cuda_graph_max_batch_size",
        "prefill graphs",
    ),
    Symbol(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"
        ".init_forward_metadata_for_breakable_cuda_graph_capture",
        "prefill graphs",
        ("forward_batch",),
    ),
    Symbol(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"
        ".prepare_forward_metadata_for_breakable_cuda_graph_replay",
        "prefill graphs",
        ("capture_metadata", "forward_batch", "static_forward_batch"),
    ),
    Symbol(
        "sglang.srt.layers.attention.minimax_sparse_backend.MiniMaxHybridAttnBackend",
        "routing dense and sparse layers",
        ("dense_backend", "sparse_backend", "sparse_layer_ids"),
    ),
    Symbol(
        "sglang.srt.layers.attention.minimax_sparse_backend.MiniMaxHybridAttnBackend.init_forward_metadata",
        "dense layers in decode",
        ("forward_batch",),
    ),
    Symbol(
        "sglang.srt.mem_cache.memory_pool.MiniMaxSparseKVPool.set_kv_buffer",
        "storing dense layers' tokens",
        ("layer", "loc", "cache_k", "cache_v", "k_scale", "v_scale"),
    ),
    Symbol("sglang.srt.model_executor.forward_batch_info.ForwardMode", "telling decode from prefill"),
    Symbol("sglang.srt.configs.model_config.is_minimax_sparse", "recognising M3"),
    Symbol(
        "sglang.srt.configs.model_config.get_minimax_sparse_attention_config", "block selection parameters"
    ),
    Symbol(
        "sglang.srt.utils.hf_transformers.config.get_config",
        "reading config.json and merging --json-model-override-args",
        ("model", "trust_remote_code", "revision", "model_override_args", "model_config_parser"),
    ),
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
    Symbol("sglang.srt.runtime_context.get_server_args", "the dtype of index keys"),
    Symbol("sglang.srt.runtime_context.get_serving", "refusing the name of another model"),
    Symbol(
        "sglang.srt.mem_cache.memory_pool.get_minimax_sparse_index_dtype",
        "the dtype of index keys",
        ("fp8_attn_gemm", "kv_cache_dtype", "model_dtype"),
    ),
    Symbol(
        "sglang.srt.mem_cache.kv_cache_configurator.get_minimax_sparse_index_dtype", "the dtype of index keys"
    ),
    Symbol(
        "sglang.srt.model_executor.pool_configurator.get_minimax_sparse_index_dtype",
        "the dtype of index keys in the memory budget",
    ),
    Symbol(
        "sglang.kernels.ops.kvcache.cache_move.copy_all_layer_kv_cache_func",
        "moving a draft's accepted tokens",
        ("data_ptrs", "strides", "tgt_loc", "src_loc", "num_locs", "num_locs_upper", "kv_copy_config"),
    ),
    Symbol(
        "sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus.batch_get",
        "drafts that are chains",
        ("req_ids",),
    ),
    Symbol(
        "sglang.srt.model_executor.forward_batch_info.ForwardMode.is_extend_without_speculative",
        "telling drafts from chunks",
    ),
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
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat.__init__",
        "the contract of requests for M3",
        ("tokenizer_manager",),
    ),
    Symbol(
        "sglang.srt.entrypoints.openai.serving_chat._validate_minimax_m3_request",
        "refusing unknown reasoning efforts",
    ),
    Symbol(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._validate_media_content",
        "refusing unknown reasoning efforts",
        ("request",),
    ),
    Symbol(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat", "refusing unknown reasoning efforts"
    ),
    Symbol(f"{_REASONING}.ReasoningParser", "markers in tool calls' values"),
    Symbol("sglang.srt.entrypoints.openai.protocol.ResponsesRequest", "markers in tool calls' values"),
    Symbol(
        f"{_REASONING}.ReasoningParser.__init__",
        "markers in tool calls' values",
        ("model_type", "stream_reasoning", "force_reasoning", "request"),
    ),
    Symbol(
        "sglang.srt.entrypoints.openai.responses_adapters.custom_tool_parameters",
        "markers in tool calls' values",
    ),
    Symbol(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._generate_stream_content",
        "streamed calls in one piece",
    ),
    Symbol(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat.supports_native_reasoning_history",
        "thinking given back to the Messages endpoint",
    ),
    Symbol(
        "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses",
        "turns given back to the Responses endpoint",
    ),
    Symbol(
        "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses._construct_input_messages",
        "turns given back to the Responses endpoint",
    ),
    Symbol(
        "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses._merge_consecutive_assistant_messages",
        "turns given back to the Responses endpoint",
        ("messages",),
    ),
    Symbol(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._process_messages",
        "thinking before forced calls",
        ("request", "is_multimodal", "output_constrained"),
    ),
    Symbol(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._effective_tools",
        "thinking before forced calls",
        ("request",),
    ),
    Symbol("sglang.srt.entrypoints.openai.protocol.MessageProcessingResult", "thinking before forced calls"),
    Symbol(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        "answering requests that would end the scheduler",
        ("obj", "input_ids"),
    ),
    Symbol("sglang.srt.arg_groups.memory_hook.get_device_memory_capacity", "the doctor"),
    Symbol("sglang.srt.arg_groups.kv_shard_hook.get_device_memory_capacity", "the doctor"),
    Symbol("sglang.srt.model_executor.cuda_graph_config.default_prefill_backend", "the doctor"),
    Symbol("sglang.srt.runtime_context.override_platform", "the doctor"),
    Symbol("sglang.srt.plugins.load_plugins", "the doctor"),
    Symbol("sglang.srt.server_args.ServerArgs", "the doctor"),
    Symbol(
        "sglang.srt.utils.server_args_config_parser.ConfigArgumentMerger.merge_config_with_args",
        "the doctor",
        ("cli_args",),
    ),
    Symbol("sglang.srt.server_args.ServerArgs.add_cli_args", "the doctor", ("parser",)),
    Symbol("sglang.srt.server_args.ServerArgs.from_cli_args", "the doctor", ("args",)),
    Symbol("sglang.srt.server_args.ServerArgs.resolve_once", "the doctor"),
    Symbol("sglang.srt.managers.tokenizer_manager.TokenizerManager", "answering bad requests"),
    Symbol(
        "sglang.srt.entrypoints.http_server.launch_server",
        "stopping before weights load when the port is taken",
        ("server_args",),
    ),
    Symbol("sglang.srt.entrypoints.http_server.app", "answering bad requests"),
    Symbol("sglang.srt.plugins.hook_registry.HookType.BEFORE", "answering bad requests"),
    Symbol(
        "sglang.srt.configs.model_config.ModelConfig.__init__",
        "reading config.json",
        ("quantization",),
    ),
    Symbol(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._init_req_state",
        "answering bad requests",
        ("obj",),
    ),
    Symbol("sglang.srt.managers.embed_types.PositionalEmbeds", "answering bad requests"),
    Symbol(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing.handle_messages",
        "answering bad requests",
        ("request", "raw_request"),
    ),
    Symbol(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing.handle_count_tokens",
        "answering bad requests",
        ("request", "raw_request"),
    ),
    Symbol(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._error_response",
        "answering bad requests",
        ("status_code", "error_type", "message"),
    ),
    Symbol("sglang.srt.configs.load_config.LoadFormat", "refusing weights that do not fit"),
    Symbol("sglang.srt.managers.io_struct.SessionParams", "answering bad requests"),
    Symbol("sglang.srt.runtime_context.get_observability", "answering bad requests"),
    Symbol(
        "sglang.srt.arg_groups.model_override_base.model_config_of",
        "stopping before weights load when the port is taken",
        ("server_args",),
    ),
    Symbol(
        "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request",
        "refusing other models' names",
        ("request", "raw_request"),
    ),
    Symbol("sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase", "refusing other models' names"),
    Symbol("sglang.srt.entrypoints.openai.protocol.DEFAULT_MODEL_NAME", "refusing other models' names"),
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
    Symbol(
        "sglang.srt.layers.attention.triton_backend.TritonAttnBackend",
        "dense layers in prefill",
        ("model_runner",),
    ),
    Symbol(
        "sglang.srt.layers.attention.hybrid_attn_backend.HybridAttnBackend.__init__",
        "dense layers in prefill",
        ("prefill_backend",),
    ),
    Symbol("sglang.srt.layers.radix_attention.RadixAttention", "attention backend"),
    Symbol(
        "sglang.srt.layers.radix_attention.RadixAttention.__init__",
        "prefill graphs",
        ("use_prefill_attention_wrapper",),
    ),
    Symbol("sglang.srt.model_executor.forward_batch_info.ForwardBatch", "attention backend"),
    Symbol("sglang.srt.platforms.interface.PlatformCapabilities", "the CPU platform"),
    Symbol("sglang.srt.platforms.cpu.CpuDeviceMixin", "the CPU platform"),
    Symbol("sglang.srt.platforms.device_mixin.PlatformEnum.OOT", "the CPU platform"),
    Symbol("sglang.srt.environ.envs.SGLANG_OPT_USE_BF16_ROUTER_GEMM", "the router without a GPU"),
    Symbol("sglang.srt.layers.quantization.QUANTIZATION_METHODS", "MXFP8"),
    Symbol("sglang.srt.layers.quantization.base_config.QuantizationConfig.from_config", "MXFP8", ("config",)),
    Symbol(
        "sglang.srt.layers.quantization.base_config.QuantizationConfig.get_quant_method",
        "MXFP8",
        ("layer", "prefix"),
    ),
    Symbol(
        "sglang.srt.layers.quantization.base_config.QuantizationConfig.override_quantization_method",
        "MXFP8",
        ("hf_quant_cfg", "user_quant"),
    ),
    Symbol("sglang.srt.layers.quantization.base_config.QuantizeMethodBase", "MXFP8"),
    Symbol(
        "sglang.srt.layers.quantization.base_config.LinearMethodBase.create_weights",
        "MXFP8",
        ("input_size_per_partition", "output_partition_sizes", "input_size", "output_size", "params_dtype"),
    ),
    Symbol(
        "sglang.srt.layers.quantization.base_config.FusedMoEMethodBase.create_weights",
        "MXFP8",
        ("num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype"),
    ),
    Symbol(
        "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.process_weights_after_loading",
        "MXFP8 checkpoints with unquantised layers",
        ("layer",),
    ),
    Symbol("sglang.srt.layers.linear.LinearBase", "MXFP8"),
    Symbol("sglang.srt.layers.linear.QKVParallelLinear", "MXFP8"),
    Symbol("sglang.srt.layers.linear.MergedColumnParallelLinear", "MXFP8"),
    Symbol("sglang.srt.layers.moe.fused_moe_triton.FusedMoE.num_global_routed_experts", "MXFP8"),
    Symbol(
        "sglang.srt.layers.moe.fused_moe_triton.FusedMoE.weight_loader",
        "MXFP8",
        ("param", "loaded_weight", "weight_name", "shard_id", "expert_id"),
    ),
    Symbol(
        "sglang.srt.layers.moe.fused_moe_triton.FusedMoE._map_global_expert_id_to_local_expert_id",
        "MXFP8",
        ("expert_id",),
    ),
    Symbol(
        "sglang.srt.eplb.expert_location.get_global_expert_location_metadata", "MXFP8 with placed experts"
    ),
    Symbol("sglang.srt.layers.moe.token_dispatcher.standard.StandardDispatchOutput.topk_output", "MXFP8"),
    Symbol("sglang.srt.layers.moe.token_dispatcher.standard.StandardCombineInput.hidden_states", "MXFP8"),
    Symbol("sglang.srt.utils.set_weight_attrs", "MXFP8", ("weight", "weight_attrs")),
    Symbol("sglang.srt.layers.deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM", "MXFP8 with many tokens"),
    Symbol("sglang.srt.layers.moe.get_moe_runner_backend", "how MXFP8 weights are kept"),
    Symbol("sglang.srt.model_loader.weight_utils.initialize_dummy_weights", "dummy weights", ("model",)),
    Symbol(
        "sglang.srt.layers.deep_gemm_wrapper.gemm_nt_f8f8bf16",
        "MXFP8 linears with many tokens",
        ("lhs", "rhs", "out"),
    ),
    Symbol(
        "sglang.srt.layers.deep_gemm_wrapper.grouped_gemm_nt_f8f8bf16_contig",
        "MXFP8 experts with many tokens",
        ("lhs", "rhs", "out", "m_indices"),
    ),
    Symbol(
        "sglang.srt.layers.deep_gemm_wrapper.grouped_gemm_nt_f8f8bf16_masked",
        "MXFP8 experts with many tokens",
        ("lhs", "rhs", "out", "masked_m", "expected_m"),
    ),
    Symbol("sglang.srt.model_loader.utils.get_model_architecture", "the model file", ("model_config",)),
    Symbol(
        f"{_UPDATER}.update_weights_from_disk",
        "refusing weights that do not fit",
        ("model_path", "load_format"),
    ),
    Symbol(f"{_UPDATER}.update_weights_from_tensor", "refusing weights that do not fit", ("named_tensors",)),
    *(Symbol(path, "the model file") for path in _MODEL_FILE),
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
