"""Reads how a checkpoint wants its blocks chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from m3_kernels.rows import BLOCK_TOKENS

from sglang_m3.config.fields import ConfigError, Fields, describe

SWITCH = {0: False, 1: True}
_ATTENTION_TYPES = {"full_attention": False, "minimax_m3_sparse": True}

_FLATTENED = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
"""The checkpoint's name in `sparse_attention_config` -> transformers' flattened one."""


def read_selection(text: Fields) -> dict[str, Any]:
    """Sparse layers and block counts, as fields of `M3Config`; sizes have been read."""
    layers = text.integer("num_hidden_layers")
    sparse = text.object("sparse_attention_config") if "sparse_attention_config" in text else None
    if sparse is None and "index_topk_blocks" not in text:
        raise text.error(
            "sparse_attention_config",
            "is missing, and so are transformers' flattened names (index_topk_blocks)",
        )

    def read(name: str, minimum: int = 1, default: Any = ...) -> tuple[Any, str]:
        """The value and the name it was found under."""
        flat = _FLATTENED.get(name)
        outer = None if flat is None else text.integer(flat, None, minimum=minimum)
        inner = None if sparse is None else sparse.integer(name, None, minimum=minimum)
        if outer is not None and inner is not None and outer != inner:
            raise text.error(flat or name, f"is {outer}, but {sparse.path(name)} is {inner}")
        if inner is not None:
            return inner, sparse.path(name)
        if outer is None and default is ...:
            raise text.error(flat, "is missing") if sparse is None else sparse.error(name, "is missing")
        return (default if outer is None else outer), text.path(flat or name)

    block_tokens, name = read("sparse_block_size")
    if block_tokens != BLOCK_TOKENS:
        raise ConfigError(name, f"is {block_tokens}; sglang-m3 serves {BLOCK_TOKENS} only")
    for field, of_main in (
        ("sparse_num_index_heads", "num_key_value_heads"),
        ("sparse_index_dim", "head_dim"),
    ):
        value, name = read(field)
        if value != text[of_main]:
            raise ConfigError(name, f"is {value}, which must equal {of_main} ({text[of_main]})")
    sparse_layers = _sparse_layers(text, sparse, layers)
    if sparse is not None:
        sparse.fixed("sparse_score_type", "max")
        sparse.fixed("use_sparse_attention", True)
        without = sparse.per_layer("sparse_disable_index_value", layers, SWITCH, ())
        with_values = sorted(set(sparse_layers) - set(without))
        if with_values:
            raise sparse.error(
                "sparse_disable_index_value",
                f"is 0 for layers {describe(with_values)}; index values are not supported",
            )
    (init_blocks, init_name), (local_blocks, local_name) = _forced_blocks(read, sparse)
    topk, topk_name = read("sparse_topk_blocks")
    if init_blocks + local_blocks > topk:
        init_name, local_name, short = (name.split(".")[-1] for name in (init_name, local_name, topk_name))
        raise ConfigError(
            topk_name,
            f"is too small: {init_name} ({init_blocks} blocks) and {local_name} ({local_blocks} blocks) "
            f"do not fit into {short} ({topk})",
        )
    return {
        "sparse_layers": sparse_layers,
        "topk_blocks": topk,
        "init_blocks": init_blocks,
        "local_blocks": local_blocks,
    }


def _sparse_layers(text: Fields, sparse: Fields | None, layers: int) -> tuple[int, ...]:
    by_type = (
        text.per_layer("layer_types", layers, _ATTENTION_TYPES, None)
        if sparse is None or _names_m3s_attention(text)
        else None
    )
    by_switch = None if sparse is None else sparse.per_layer("sparse_attention_freq", layers, SWITCH, by_type)
    if by_switch is None and by_type is None:
        raise (
            text.error("layer_types", "is missing")
            if sparse is None
            else sparse.error("sparse_attention_freq", "is missing")
        )
    if None not in (by_switch, by_type) and by_switch != by_type:
        raise text.error("layer_types", "and sparse_attention_freq name different layers")
    found = by_type if by_switch is None else by_switch
    if not found:
        raise text.error(
            "num_hidden_layers", "has no layer with sparse attention; layer_types or sparse_attention_freq"
        )
    return found


def _names_m3s_attention(text: Fields) -> bool:
    """Whether `layer_types` is M3's; transformers' class for the text part's model type fills in its own."""
    if "layer_types" not in text:
        return False
    types = text["layer_types"]
    # What is no list is refused by whoever reads it.
    return not isinstance(types, list | tuple) or "minimax_m3_sparse" in types


def _forced_blocks(
    read: Callable[..., tuple[Any, str]], sparse: Fields | None
) -> tuple[tuple[int, str], tuple[int, str]]:
    """Init and local blocks with their fields' names: counts of blocks, else of tokens."""
    init, local = read("sparse_init_block", 0, None), read("sparse_local_block", 0, None)
    if init[0] is None:
        init = (0, init[1]) if sparse is None else _blocks_of_tokens(sparse, "init", 0)
    if local[0] is None:
        # As SGLang reads it: the window may begin inside a block, which is then chosen as well.
        local = (1, local[1]) if sparse is None else _blocks_of_tokens(sparse, "local", 1)
    return init, local


def _blocks_of_tokens(sparse: Fields, which: str, more: int) -> tuple[int, str]:
    name = f"sparse_{which}_tokens"
    count = sparse.integer(name, None, minimum=0)
    if count is None:
        raise sparse.error(f"sparse_{which}_block", f"is missing, and so is {name}")
    return -(-count // BLOCK_TOKENS) + more, sparse.path(name)
