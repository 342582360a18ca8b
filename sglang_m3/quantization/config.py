"""SGLang's quantisation config for M3's MXFP8 weights."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from sglang_m3.quantization.experts import M3MxFp8ExpertsMethod
from sglang_m3.quantization.linear import M3MxFp8LinearMethod
from sglang_m3.quantization.loading import Origin

METHOD = "m3_mxfp8"
"""Name of the quantisation in SGLang's table. Users say `mxfp8`; the provider resolves it for M3 models."""

FORMAT = "mxfp8"
"""`quant_method` of a checkpoint in the format."""

MERGED_PROJECTIONS = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "index_qkv_proj": ["index_q_proj", "index_k_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
"""Layer -> the checkpoint's tensors in it, where SGLang's loader does not say so."""


class M3MxFp8Config(QuantizationConfig):
    """MXFP8 for linears and routed experts of M3; embeddings, head, router and tower have no method.

    Args:
        origin: `"mxfp8"` for a checkpoint in the format, in which a layer without scales stays as it is;
            `"plain"` for a BF16 checkpoint that is quantised while it loads.
        merged: layer -> the checkpoint's tensors in it.
    """

    def __init__(self, origin: Origin = "plain", merged: dict[str, list[str]] | None = None) -> None:
        super().__init__()
        self.origin: Origin = origin
        self.packed_modules_mapping = merged or MERGED_PROJECTIONS

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> M3MxFp8Config:
        """From a checkpoint's `quantization_config`. Which tensors are quantised, their scales say.

        Raises:
            ValueError: another block size or activation scheme than the format has.
        """
        block = config.get("weight_block_size", [1, 32])
        if list(block) != [1, 32]:
            raise ValueError(f"quantization_config: weight_block_size is {block}, MXFP8 has [1, 32]")
        return cls("mxfp8", config.get("packed_modules_mapping"))

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: dict[str, Any], user_quant: str | None) -> str | None:
        return METHOD if user_quant == METHOD and hf_quant_cfg.get("quant_method") == FORMAT else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            return M3MxFp8LinearMethod(self, prefix)
        if isinstance(layer, FusedMoE):
            return M3MxFp8ExpertsMethod(self, prefix)
        return None

    def get_scaled_act_names(self) -> list[str]:
        return []
