"""Which tensors of a MiniMax-M3 checkpoint the released MXFP8 checkpoint quantises, by name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from sglang_m3.models.weight_map import SCALE_SUFFIX as SCALE_SUFFIX

_TEXT_LAYER = r"(?:language_model\.)?model\.layers\.\d+\."
_QUANTIZED = re.compile(
    _TEXT_LAYER
    + r"(?:self_attn\.(?:index_)?[qkvo]_proj"
    + r"|mlp\.(?:gate|up|down)_proj"
    + r"|block_sparse_moe\.experts\.\d+\.w[123]"
    + r"|block_sparse_moe\.shared_experts\.(?:gate|up|down)_proj)\.weight"
)
_ROUTER = re.compile(rf"({_TEXT_LAYER}block_sparse_moe\.gate)\.weight")


def is_quantized(name: str) -> bool:
    """Whether the format quantises the tensor: projections of attention, index and MLPs, and all experts."""
    return _QUANTIZED.fullmatch(name) is not None


def has_no_rule(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the tensor is a matrix of a text layer, but neither quantised nor the router."""
    return (
        len(shape) >= 2
        and re.match(_TEXT_LAYER, name) is not None
        and not is_quantized(name)
        and _ROUTER.fullmatch(name) is None
    )


def quantization_config(names: Iterable[str]) -> dict[str, Any]:
    """config.json's `quantization_config` for a checkpoint with these tensors, as the release has it.

    The release lists every router by its full name, in the order of strings, after five names common to all.
    """
    routers = sorted(match[1] for match in map(_ROUTER.fullmatch, names) if match)
    common = ["lm_head", "model.embed_tokens", "vision_tower", "multi_modal_projector", "patch_merge_mlp"]
    return {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [1, 32],
        "ignored_layers": common + routers,
    }
