"""What a tiny checkpoint looks like, and the config files that say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sglang_m3.tiny.vocabulary import BOS, EOS, IMAGE, PAD, VIDEO, token_id

BLOCK_SIZE = 128
"""Tokens per selected block. Fixed: SGLang's M3 kernels and the released checkpoint know no other."""

ROPE_THETA = 5_000_000.0
PATCH_SIZE = 14
SPATIAL_MERGE = 2
TEMPORAL_PATCH = 2


@dataclass(frozen=True)
class TinyConfig:
    """Shape and seed of a tiny MiniMax-M3. Equal configs give byte-identical checkpoints (see `build`).

    The layer pattern is the released model's: `dense_layers` layers with dense attention and a dense MLP,
    then layers with block-sparse attention and experts. Rotary embeddings cover half of `head_dim`, an index
    head is as wide as `head_dim` and serves one kv head; there is one shared expert and no index value.

    Raises ValueError when a field contradicts what SGLang or transformers can load.
    """

    seed: int = 0
    layers: int = 5
    dense_layers: int = 1
    hidden: int = 128
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    dense_intermediate: int = 256
    expert_intermediate: int = 128
    """Width of a routed expert and of the shared expert."""
    experts: int = 8
    experts_per_token: int = 2
    topk_blocks: int = 4
    """Blocks a row attends to in a sparse layer, its own (local) block included."""
    vocab: int = 2560
    """Rows of the embedding; the tokenizer fills them all."""
    max_position: int = 131072
    """Longest request in tokens."""
    vision_layers: int = 2
    vision_hidden: int = 64
    vision_heads: int = 4
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Storage type. The values are the same: every weight is representable in bfloat16."""
    shard_mb: int = 4
    """Largest weight file in MiB (a single larger tensor gets a file of its own), before quantisation."""
    quantize: Literal["mxfp8"] | None = None
    """Format to quantise the checkpoint to, as `sglang_m3.quantize` does."""

    def __post_init__(self) -> None:
        rules = {
            "layers > dense_layers >= 1": self.layers > self.dense_layers >= 1,
            "heads is a multiple of kv_heads": self.heads % self.kv_heads == 0,
            "head_dim is a multiple of 32": self.head_dim % 32 == 0,
            "1 <= experts_per_token <= experts": 1 <= self.experts_per_token <= self.experts,
            "topk_blocks >= 2 (one local, one free)": self.topk_blocks >= 2,
            "vocab is a multiple of 64, at least 512": self.vocab % 64 == 0 and self.vocab >= 512,
            "vision_hidden / vision_heads is an even number >= 12": (
                self.vision_hidden % (2 * self.vision_heads) == 0
                and self.vision_hidden // self.vision_heads >= 12
            ),
            "dtype is bfloat16 or float32": self.dtype in ("bfloat16", "float32"),
            "quantize is mxfp8 or nothing": self.quantize in (None, "mxfp8"),
            "mxfp8 needs hidden and intermediate sizes that are multiples of 32": self.quantize is None
            or (self.hidden | self.dense_intermediate | self.expert_intermediate) % 32 == 0,
            "sizes are positive": min(self.hidden, self.max_position, self.vision_layers, self.shard_mb) > 0,
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise ValueError(f"not a loadable tiny checkpoint, need: {'; '.join(broken)}; got {self}")

    @property
    def sparse_layers(self) -> range:
        """Indices of the layers with block-sparse attention (and experts)."""
        return range(self.dense_layers, self.layers)


def model_config(config: TinyConfig) -> dict[str, Any]:
    """config.json in the released checkpoint's VL shape.

    Every field is written out: SGLang's config class for M3 applies no defaults under transformers 5.
    """
    sparse = [int(layer in config.sparse_layers) for layer in range(config.layers)]
    ids = {
        "bos_token_id": token_id(BOS, config.vocab),
        "eos_token_id": token_id(EOS, config.vocab),
        "pad_token_id": token_id(PAD, config.vocab),
    }
    text = {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m2",
        "torch_dtype": config.dtype,
        **ids,
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.expert_intermediate,
        "shared_intermediate_size": config.expert_intermediate,
        "dense_intermediate_size": config.dense_intermediate,
        "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-6,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "rope_theta": ROPE_THETA,
        "rotary_dim": config.head_dim // 2,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": config.max_position,
        "attention_dropout": 0.0,
        "attention_output_gate": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "n_shared_experts": 1,
        "moe_layer_freq": sparse,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "routed_scaling_factor": 2.0,
        "router_jitter_noise": 0.0,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
        "num_mtp_modules": 0,
        "num_nextn_predict_layers": 0,
        "use_mtp": False,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": config.head_dim,
            "sparse_num_index_heads": config.kv_heads,
            "sparse_topk_blocks": config.topk_blocks,
            "sparse_block_size": BLOCK_SIZE,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_disable_index_value": sparse,
            "sparse_attention_freq": sparse,
        },
    }
    compression = {
        "image_token_compression_method": "patch_merge",
        "spatial_merge_size": SPATIAL_MERGE,
        "temporal_patch_size": TEMPORAL_PATCH,
    }
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": config.vision_hidden,
        "intermediate_size": 2 * config.vision_hidden,
        "num_hidden_layers": config.vision_layers,
        "num_attention_heads": config.vision_heads,
        "num_channels": 3,
        "image_size": 2016,
        "patch_size": PATCH_SIZE,
        "temporal_patch_size": TEMPORAL_PATCH,
        "spatial_merge_size": SPATIAL_MERGE,
        "hidden_act": "gelu",
        "projector_hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "position_embedding_type": "rope",
        "rope_mode": "3d",
        "rope_theta": 10000.0,
        "vision_segment_max_frames": 4,
        "img_token_compression_config": compression,
    }
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "torch_dtype": config.dtype,
        **ids,
        "text_config": text,
        "vision_config": vision,
        "image_token_index": token_id(IMAGE, config.vocab),
        "video_token_index": token_id(VIDEO, config.vocab),
        "image_seq_length": 576,
        "process_image_mode": "dynamic_res",
        "image_grid_pinpoints": None,
        "img_token_compression_config": compression,
        "projector_hidden_act": "gelu",
        "projector_hidden_size": config.hidden,
        "multimodal_projector_bias": True,
        "patch_merge_bias": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": False,
    }


def generation_config(config: TinyConfig) -> dict[str, Any]:
    """generation_config.json: the released sampling defaults."""
    return {
        "bos_token_id": token_id(BOS, config.vocab),
        "eos_token_id": token_id(EOS, config.vocab),
        "pad_token_id": token_id(PAD, config.vocab),
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 40,
    }


def preprocessor_configs() -> dict[str, dict[str, Any]]:
    """The processor files by name, readable by transformers' M3 processors and by SGLang's.

    `size` is a pair because SGLang derives its cap from a pair; transformers ignores exactly [672, 672].
    """
    common = {
        "processor_class": "MiniMaxM3VLProcessor",
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "patch_size": PATCH_SIZE,
        "merge_size": SPATIAL_MERGE,
        "temporal_patch_size": TEMPORAL_PATCH,
    }
    return {
        "preprocessor_config.json": {
            **common,
            "image_processor_type": "MiniMaxM3VLImageProcessor",
            "size": [672, 672],
            "img_token_compression_config": {
                "spatial_merge_size": SPATIAL_MERGE,
                "temporal_patch_size": TEMPORAL_PATCH,
            },
        },
        "video_preprocessor_config.json": {
            **common,
            "video_processor_type": "MiniMaxM3VLVideoProcessor",
            "size": {"height": 672, "width": 672},
        },
    }
