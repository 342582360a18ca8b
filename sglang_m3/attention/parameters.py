"""How a checkpoint wants its blocks chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from m3_kernels.rows import BLOCK_TOKENS
from sglang.srt.configs.model_config import (
    get_minimax_sparse_attention_config,
    get_minimax_sparse_disable_value_layer_ids,
    get_minimax_sparse_layer_ids,
    get_minimax_sparse_score_type,
    is_minimax_sparse,
)


def serves(model_config: Any) -> bool:
    """Whether the plugin serves this model: M3 without quantisation. Others keep SGLang's own parts."""
    return is_minimax_sparse(model_config.hf_config) and model_config.quantization is None


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
        """Read `sparse_attention_config`.

        Raises:
            ValueError: the checkpoint asks for something that the plugin does not do; names the field.
        """
        sparse = get_minimax_sparse_attention_config(hf_config)
        block_tokens = sparse["sparse_block_size"]
        if block_tokens != BLOCK_TOKENS:
            raise ValueError(f"sparse_block_size is {block_tokens}; sglang-m3 serves {BLOCK_TOKENS} only")
        score_type = get_minimax_sparse_score_type(sparse)
        if score_type != "max":
            raise ValueError(f"sparse_score_type is {score_type!r}; sglang-m3 serves 'max' only")
        _, sparse_layers = get_minimax_sparse_layer_ids(sparse)
        text = getattr(hf_config, "text_config", hf_config)
        for name, of_main in (
            ("sparse_num_index_heads", "num_key_value_heads"),
            ("sparse_index_dim", "head_dim"),
        ):
            if sparse[name] != _read(text, of_main):
                raise ValueError(
                    f"{name} is {sparse[name]}, which must equal {of_main} ({_read(text, of_main)})"
                )
        with_values = sorted(set(sparse_layers) - set(get_minimax_sparse_disable_value_layer_ids(sparse)))
        if with_values:
            raise ValueError(
                f"sparse_disable_index_value is 0 for layers {with_values}; index values are not supported"
            )
        init_blocks = sparse.get("sparse_init_block")
        if init_blocks is None:
            init_blocks = -(-sparse["sparse_init_tokens"] // BLOCK_TOKENS)
        local_blocks = sparse.get("sparse_local_block")
        if local_blocks is None:
            # As SGLang reads it: the window may begin inside a block, which is then chosen as well.
            local_blocks = -(-sparse["sparse_local_tokens"] // BLOCK_TOKENS) + 1
        topk = sparse["sparse_topk_blocks"]
        if init_blocks + local_blocks > topk:
            raise ValueError(
                f"sparse_init_block ({init_blocks}) and sparse_local_block ({local_blocks}) "
                f"do not fit into sparse_topk_blocks ({topk})"
            )
        return cls(topk, init_blocks, local_blocks, tuple(sparse_layers))


def _read(config: Any, name: str) -> Any:
    """A field of a configuration, which transformers leaves a dict where it does not know the model type."""
    return config[name] if isinstance(config, dict) else getattr(config, name)
