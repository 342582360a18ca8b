"""The published checkpoints: what their names stand for, without asking the network."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).with_name("minimax_m3.json")
"""MiniMax-M3's config.json, the fields that decide sizes; all published checkpoints share its geometry.

`max_position_embeddings` differs between revisions (524,288 or 1,048,576); this is the longer one.
"""

_MXFP8 = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}

_QUANTIZATION: dict[str, dict[str, Any] | None] = {
    "MiniMaxAI/MiniMax-M3": None,
    "MiniMaxAI/MiniMax-M3-MXFP8": _MXFP8,
    "MiniMaxAI/MiniMax-M3.1-Flash": {
        **_MXFP8,
        "moe_quant_algo": "NVFP4",
        "moe_quant_format": "nvfp4-pack-quantized",
    },
    "nvidia/MiniMax-M3-NVFP4": {"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION"},
}

NAMES = tuple(_QUANTIZATION)
"""Hugging Face's names of the checkpoints."""


def config_of(name: str) -> dict[str, Any] | None:
    """config.json of a published checkpoint, by its name in any case; None for another name."""
    by_name = {known.lower(): known for known in NAMES}
    known = by_name.get(name.lower())
    if known is None:
        return None
    config = copy.deepcopy(json.loads(CONFIG.read_text(encoding="utf-8")))
    if _QUANTIZATION[known] is not None:
        config["quantization_config"] = _QUANTIZATION[known]
    return config
