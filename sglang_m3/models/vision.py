"""The seam to upstream's vision half: everything of it that the model file uses."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_batch import MultimodalDataItem
from sglang.srt.models import minimax_vl_common as upstream
from sglang.srt.models.minimax_vl_common import MiniMaxVLVisionModel
from sglang.srt.runtime_context import get_mm
from sglang.srt.utils import add_prefix
from torch import Tensor

UNUSED_PARAMETERS = (
    "vision_tower.vision_model.post_layernorm.weight",
    "vision_tower.vision_model.post_layernorm.bias",
)
"""Upstream's tower has a norm that it never applies and no checkpoint fills."""


def build(config: Any, prefix: str) -> MiniMaxVLVisionModel:
    """Tower and projectors, unquantised. `config` is the top-level configuration."""
    vision = config.vision_config
    raw = vision if isinstance(vision, dict) else vision.to_dict()
    return MiniMaxVLVisionModel(
        config=upstream.CLIPVisionConfig.from_dict(raw),
        text_hidden_size=config.text_config.hidden_size,
        projector_hidden_size=getattr(config, "projector_hidden_size", None),
        quant_config=None,
        prefix=add_prefix("vision_tower", prefix),
        multimodal_projector_bias=getattr(config, "multimodal_projector_bias", True),
        patch_merge_bias=getattr(config, "patch_merge_bias", True),
    )


def image_features(tower: MiniMaxVLVisionModel, items: list[MultimodalDataItem]) -> Tensor:
    """`[tokens, hidden]` for the placeholders of images, in order."""
    return upstream.get_image_feature(tower, items, get_mm().mm_enable_dp_encoder)


def video_features(tower: MiniMaxVLVisionModel, items: list[MultimodalDataItem]) -> Tensor:
    """`[tokens, hidden]` for the placeholders of videos, in order."""
    return upstream.get_video_feature(tower, items, get_mm().mm_enable_dp_encoder)
