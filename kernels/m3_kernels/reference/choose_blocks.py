"""Score and select in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from m3_kernels.prefix_plan import PrefixPlan
from m3_kernels.reference.score_blocks import score_blocks
from m3_kernels.reference.select_blocks import select_blocks
from m3_kernels.rows import Rows


def choose_blocks(
    index_q: Tensor,
    index_k: Tensor,
    page_table: Tensor,
    rows: Rows,
    plan: PrefixPlan,
    *,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    workspace: Tensor | None = None,
    out: Tensor,
) -> Tensor:
    """`select_blocks(score_blocks(...))`, the operator that the attention backend calls.

    Shapes and rules are those of the two operators; the result equals theirs bit for bit. `workspace` is
    scratch memory for the kernels, which hold at most 64 MiB of `[H, T, B]` at once; this reference holds all
    of it elsewhere.
    """
    heads, row_count = index_q.shape[1], index_q.shape[0]
    scores = torch.empty((heads, row_count, page_table.shape[1]), dtype=torch.float32, device=index_q.device)
    score_blocks(index_q, index_k, page_table, rows, plan, out=scores)
    return select_blocks(scores, rows, topk=topk, init_blocks=init_blocks, local_blocks=local_blocks, out=out)
