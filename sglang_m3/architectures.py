"""The checkpoint architectures that the plugin serves."""

M3_ARCHITECTURES = ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration")
"""SGLang's names (`sglang.srt.configs.model_config.is_minimax_sparse`), M3 and M3.1 alike."""
