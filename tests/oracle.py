"""transformers' own MiniMax-M3 as the oracle for what we serve.

Full-sequence forwards without a cache, one sequence at a time, so positions are 0..N-1 and blocks start at 0.
Memory: about 30 bytes * query heads * N**2.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import MiniMaxM3SparseForConditionalGeneration
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

Model = MiniMaxM3SparseForConditionalGeneration
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class OracleRun:
    """What one forward shows."""

    logprobs: torch.Tensor
    """[N, vocab] float32 (float64 for a float64 model), row i predicts token i + 1."""
    blocks: dict[int, torch.Tensor]
    """Per sparse layer [H, N, topk] int32: chosen blocks of each index head and row, ascending, then -1."""


def load_oracle(checkpoint: str | Path, dtype: torch.dtype = torch.float32) -> Model:
    """The checkpoint in eager attention. Asserts that every tensor of it was used and none was missing."""
    model, info = Model.from_pretrained(
        checkpoint,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
        local_files_only=True,
    )
    problems = {kind: names for kind, names in info.items() if names}
    assert not problems, f"transformers loads {checkpoint} with {problems}"
    return model.eval()


def indexers(model: Model) -> dict[int, MiniMaxM3VLIndexer]:
    """The modules that choose blocks, by layer; their output is [1, H, N, K] block ids, -1 for unused."""
    found = [module for module in model.modules() if isinstance(module, MiniMaxM3VLIndexer)]
    return {indexer.layer_idx: indexer for indexer in found}


@torch.no_grad()
def run(model: Model, token_ids: Sequence[int], **media: torch.Tensor) -> OracleRun:
    """One forward over `token_ids`. `media`: the processor's tensors (pixel_values, image_grid_thw, ...)."""
    topk = model.config.text_config.index_topk_blocks
    blocks: dict[int, torch.Tensor] = {}

    def record(indexer: MiniMaxM3VLIndexer, _inputs: object, chosen: torch.Tensor) -> None:
        blocks[indexer.layer_idx] = _ascending(chosen[0], topk)

    handles = [indexer.register_forward_hook(record) for indexer in indexers(model).values()]
    try:
        logits = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False, **media).logits[0]
    finally:
        for handle in handles:
            handle.remove()
        # Under `make test` malloc gives nothing back by itself, and this takes gigabytes.
        _LIBC.malloc_trim(0)
    return OracleRun(logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)), blocks)


def logprobs(model: Model, token_ids: Sequence[int], **media: torch.Tensor) -> torch.Tensor:
    """[N, vocab]: log-probabilities after each of the N tokens."""
    return run(model, token_ids, **media).logprobs


def selected_blocks(model: Model, token_ids: Sequence[int]) -> dict[int, torch.Tensor]:
    """Per sparse layer [H, N, topk] int32: the chosen blocks, ascending, then -1."""
    return run(model, token_ids).blocks


def _ascending(chosen: torch.Tensor, topk: int) -> torch.Tensor:
    """[H, N, K <= topk] in any order with -1 for unused -> [H, N, topk] int32 ascending, -1 last."""
    unused = torch.iinfo(torch.int32).max
    padded = torch.nn.functional.pad(chosen.int(), (0, topk - chosen.shape[-1]), value=-1)
    ordered = padded.masked_fill(padded < 0, unused).sort(-1).values
    return ordered.masked_fill(ordered == unused, -1)
