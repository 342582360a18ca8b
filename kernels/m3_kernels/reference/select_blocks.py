"""Choose the best blocks of every row."""

from __future__ import annotations

import torch
from torch import Tensor

from m3_kernels.rows import BLOCK_TOKENS, Rows


def check_selection(topk: int, init_blocks: int, local_blocks: int) -> None:
    """Raise `ValueError` when the forced blocks do not fit into the selection."""
    if min(init_blocks, local_blocks) < 0 or init_blocks + local_blocks > topk:
        raise ValueError(
            f"init_blocks ({init_blocks}) and local_blocks ({local_blocks}) must not be negative and "
            f"must fit into topk ({topk})"
        )


def select_blocks(
    scores: Tensor, rows: Rows, *, topk: int, init_blocks: int, local_blocks: int, out: Tensor
) -> Tensor:
    """Choose the `topk` best visible blocks of every row and head.

    Args:
        scores: `[H, T, B]` float32 from `score_blocks`; entries past a row's own block are never read.
        rows: the query tokens; a padded row chooses nothing (-1 everywhere).
        topk: blocks chosen at most.
        init_blocks: the first so many blocks are always chosen, inside `topk`.
        local_blocks: the last so many blocks up to the row's own are always chosen, inside `topk`.
        out: `[H, T, topk]` int32, overwritten: min(topk, visible) logical block ids, ascending, then -1.
            Of equal scores the lower id wins; NaN counts as lower than every number, -inf included.

    Returns:
        `out`.

    Raises:
        ValueError: the forced blocks do not fit into `topk`.

    The rule is that of the MiniMax-M3 release (`sparse_init_block`, `sparse_local_block`,
    `sparse_topk_blocks`) with a tie rule added, which the release leaves open.
    """
    check_selection(topk, init_blocks, local_blocks)
    table_blocks = scores.shape[-1]
    block = torch.arange(table_blocks, device=scores.device)
    own = torch.where(rows.request >= 0, rows.position // BLOCK_TOKENS, -1)[:, None]
    visible = block <= own
    forced = visible & ((block < init_blocks) | (block > own - local_blocks))
    # Classes from worst to best: invisible, NaN, a number, forced.
    rank = torch.where(visible, torch.where(scores.isnan(), 1, 2), 0)
    rank = torch.where(forced, 3, rank)
    number = torch.where(scores.isnan(), float("-inf"), scores)
    by_score = number.sort(dim=-1, descending=True, stable=True).indices
    by_rank = rank.gather(-1, by_score).sort(dim=-1, descending=True, stable=True).indices
    best = by_score.gather(-1, by_rank)[..., :topk]
    best = torch.where(rank.gather(-1, best) > 0, best, table_blocks).sort(-1).values
    out.fill_(-1)
    out[..., : best.shape[-1]] = torch.where(best < table_blocks, best, -1)
    return out
