"""How a checkpoint wants its blocks chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.model_config import is_minimax_sparse

from sglang_m3.config import M3Config
from sglang_m3.overrides import SERVED


def serves(model_config: Any) -> bool:
    """Whether the plugin serves this model: M3 in BF16 or MXFP8. Others keep SGLang's own parts."""
    return is_minimax_sparse(model_config.hf_config) and model_config.quantization in (None, *SERVED)


@dataclass(frozen=True)
class SelectionParameters:
    """Block selection of one checkpoint; counts are in blocks of 128 tokens.

    Attributes:
        topk: blocks a query token attends to, forced ones included.
        init_blocks: first blocks that are always chosen.
        local_blocks: last blocks that are always chosen, the token's own among them.
        sparse_layers: layer numbers with block-sparse attention; all others are dense.
    """

    topk: int
    init_blocks: int
    local_blocks: int
    sparse_layers: tuple[int, ...]

    @classmethod
    def from_hf_config(cls, hf_config: Any) -> SelectionParameters:
        """Read them from a configuration.

        Raises:
            ConfigError: the checkpoint asks for something that the plugin does not do; names the field.
        """
        config = M3Config.read(hf_config)
        return cls(config.topk_blocks, config.init_blocks, config.local_blocks, config.sparse_layers)
