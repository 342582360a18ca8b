"""M3Config: what a MiniMax-M3 checkpoint's config.json says, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from m3_kernels.rows import BLOCK_TOKENS

from sglang_m3.architectures import M3_ARCHITECTURES
from sglang_m3.config.fields import ConfigError, Fields, describe
from sglang_m3.config.rope import Rope
from sglang_m3.config.selection import read_selection
from sglang_m3.config.sizes import CONSTANTS, read_experts, read_sizes

_TEXT_ONLY, _WITH_VISION = M3_ARCHITECTURES

_GEOMETRY = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "moe_layer_freq",
    "sparse_attention_config",
)
"""Text fields that must not say something else beside `text_config` than in it."""


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower's sizes (channels, layers, pixels) that decide its weights."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    projector_hidden_size: int


@dataclass(frozen=True)
class M3Config:
    """One checkpoint's configuration. Names are config.json's where it has one, sizes are whole-model.

    Attributes:
        architecture: one of `M3_ARCHITECTURES`.
        max_position_embeddings: longest context in tokens, scaling included.
        intermediate_size: width of a routed expert; `shared_intermediate_size`: of the shared expert;
            `dense_intermediate_size`: of a dense layer's MLP (None where all layers have experts).
        moe_layers: layer numbers with experts; `sparse_layers`: with block-sparse attention.
        topk_blocks: blocks of 128 tokens that a token attends to in a sparse layer, forced ones included.
        init_blocks: first blocks that are always chosen; `local_blocks`: last ones, the own among them.
        quant_method: what `quantization_config` declares, None for none.
        dtype: what the checkpoint declares, None for none.
        vision: None for a text-only checkpoint.

    An index head has `head_dim` channels and serves one kv head; keys have one index head.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    intermediate_size: int
    shared_intermediate_size: int
    dense_intermediate_size: int | None
    num_local_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_alpha: float
    swiglu_limit: float
    moe_layers: tuple[int, ...]
    sparse_layers: tuple[int, ...]
    topk_blocks: int
    init_blocks: int
    local_blocks: int
    quant_method: str | None
    dtype: str | None
    vision: VisionConfig | None

    @classmethod
    def read(cls, config: Any) -> M3Config:
        """Read a config.json's content, or the configuration object that transformers made of it.

        Fields are under `text_config` or flat, those of the selection in `sparse_attention_config` or under
        transformers' flattened names. Further fields are ignored.

        Raises:
            ConfigError: a field is missing, is of the wrong type or out of range, contradicts another one, or
                asks for something that the plugin does not serve.
        """
        values = as_mapping(config)
        top = Fields(values)
        architecture = _architecture(values)
        text = top
        if "text_config" in top:
            text = Fields(as_mapping(values["text_config"]), "text_config")
            _check_levels(top, text)
        elif architecture == _WITH_VISION:
            raise ConfigError("text_config", f"is missing; {architecture} has one")
        for part in (top, text):
            part.fixed("tie_word_embeddings", False)
        return cls(
            architecture=architecture,
            **read_sizes(text),
            **read_experts(text),
            **read_selection(text),
            quant_method=_quant_method(top, text),
            dtype=_dtype(top, text),
            vision=_read_vision(top, values) if architecture == _WITH_VISION else None,
        )

    @property
    def dense_attention_layers(self) -> tuple[int, ...]:
        """Layer numbers with full attention."""
        return tuple(sorted(set(range(self.num_hidden_layers)) - set(self.sparse_layers)))

    def text_fields(self) -> dict[str, Any]:
        """The text fields under the checkpoint's own names, complete, for code that applies other defaults.

        Rotary parameters are in SGLang's names, which differ from transformers' for attention factors.
        """
        sparse, experts = (
            [int(layer in layers) for layer in range(self.num_hidden_layers)]
            for layers in (self.sparse_layers, self.moe_layers)
        )
        names = (
            "hidden_size",
            "vocab_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
        )
        names += ("head_dim", "max_position_embeddings", "rms_norm_eps", "intermediate_size")
        names += ("shared_intermediate_size", "dense_intermediate_size", "num_local_experts")
        names += ("num_experts_per_tok", "routed_scaling_factor", "swiglu_alpha", "swiglu_limit")
        return {
            **{name: getattr(self, name) for name in names},
            **CONSTANTS,
            "rope_theta": self.rope.theta,
            "rotary_dim": self.rope.rotary_dim,
            "partial_rotary_factor": self.rope.rotary_dim / self.head_dim,
            "rope_parameters": self.rope.sglang_parameters(self.head_dim),
            "moe_layer_freq": experts,
            "sparse_attention_config": {
                "use_sparse_attention": True,
                "sparse_index_dim": self.head_dim,
                "sparse_num_index_heads": self.num_key_value_heads,
                "sparse_topk_blocks": self.topk_blocks,
                "sparse_block_size": BLOCK_TOKENS,
                "sparse_score_type": "max",
                "sparse_init_block": self.init_blocks,
                "sparse_local_block": self.local_blocks,
                "sparse_disable_index_value": sparse,
                "sparse_attention_freq": sparse,
            },
        }


def as_mapping(config: Any) -> Any:
    """A configuration object of transformers (or a plain one) as a mapping; anything else as it is."""
    if hasattr(config, "to_dict"):
        return config.to_dict()
    return vars(config) if hasattr(config, "__dict__") else config


def _architecture(values: Mapping[str, Any]) -> str:
    architectures = values.get("architectures")
    first = architectures[0] if isinstance(architectures, list | tuple) and architectures else None
    if first not in M3_ARCHITECTURES:
        raise ConfigError(
            "architectures",
            f"is {describe(architectures)}; sglang-m3 serves {' and '.join(M3_ARCHITECTURES)}",
        )
    return first


def _check_levels(top: Fields, text: Fields) -> None:
    for name in _GEOMETRY:
        if name in top and name in text and top[name] != text[name]:
            raise top.error(
                name, f"is {describe(top[name])} beside text_config, but {describe(text[name])} in it"
            )


def _quant_method(top: Fields, text: Fields) -> str | None:
    for part in (top, text):
        if "quantization_config" in part:
            return part.object("quantization_config").string("quant_method", None)
    return None


def _dtype(top: Fields, text: Fields) -> str | None:
    for part in (text, top):
        for name in ("dtype", "torch_dtype"):
            if name in part:
                return str(part[name]).removeprefix("torch.")
    return None


def _read_vision(top: Fields, values: Mapping[str, Any]) -> VisionConfig:
    if "vision_config" not in top:
        raise ConfigError("vision_config", f"is missing; {_WITH_VISION} has one")
    vision = Fields(as_mapping(values["vision_config"]), "vision_config")
    hidden, heads = vision.integer("hidden_size"), vision.integer("num_attention_heads")
    if hidden % heads:
        raise vision.error("hidden_size", f"({hidden}) is not a multiple of num_attention_heads ({heads})")
    merging = vision
    if "img_token_compression_config" in vision:
        merging = vision.object("img_token_compression_config")
    return VisionConfig(
        hidden_size=hidden,
        intermediate_size=vision.integer("intermediate_size"),
        num_hidden_layers=vision.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_channels=vision.integer("num_channels", 3),
        patch_size=vision.integer("patch_size"),
        temporal_patch_size=merging.integer("temporal_patch_size", 2),
        spatial_merge_size=merging.integer("spatial_merge_size", 2),
        projector_hidden_size=top.integer("projector_hidden_size"),
    )
