"""Score and select on sm90: two launches per pass, in a bounded workspace."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import Tensor

from m3_kernels.prefix_plan import PrefixPlan
from m3_kernels.reference.select_blocks import check_selection
from m3_kernels.rows import Rows
from m3_kernels.triton.sm90_common import aligned, check_workspace
from m3_kernels.triton.sm90_score_blocks import launch_scores, padded_spans, pick_launch
from m3_kernels.triton.sm90_select_blocks import launch_selection

WORKSPACE_LIMIT = 64 << 20
"""Bytes of scores held at once, about what the L2 cache holds; more rows go in several passes."""

SCORE_BYTES = 4


def choose_blocks_workspace_bytes(
    row_count: int, heads: int, table_blocks: int, limit: int = WORKSPACE_LIMIT
) -> int:
    """Bytes that `choose_blocks` asks for: all scores of the step, or as many rows as fit into `limit`.

    At least one row's. A smaller workspace than this works too, with more passes.
    """
    row_bytes = heads * _padded(table_blocks) * SCORE_BYTES
    return aligned(row_bytes * min(row_count, max(1, limit // row_bytes)))


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
    workspace: Tensor,
    out: Tensor,
) -> Tensor:
    """`select_blocks(score_blocks(...))` bit for bit, without all scores at once; see the two operators.

    Args:
        index_q: `[T, H, D]` bfloat16.
        index_k: `[P, 128, 1, D]` pages, bfloat16 or float8_e4m3fn.
        page_table: `[R, B]` int32.
        rows, plan: the query tokens and `plan_prefix` of the same table and rows. The first launch may read
            these three before its predecessor on the stream has ended; `plan_prefix` has seen to it that
            they are older.
        topk, init_blocks, local_blocks: as for `select_blocks`.
        workspace: uint8, `choose_blocks_workspace_bytes(T, H, B)` bytes; its size decides how many rows are
            scored at once, which changes the time but no bit of the result.
        out: `[H, T, topk]` int32, overwritten.

    Returns:
        `out`. Two launches per pass, no allocation, no host synchronisation, capturable in a CUDA graph. Rows
        that see at most `topk` blocks are not scored.

    Raises:
        ValueError: the forced blocks do not fit into `topk`, or `topk` is above 255.
    """
    check_selection(topk, init_blocks, local_blocks)
    heads, row_count = index_q.shape[1], len(rows)
    assert index_q.shape[0] == row_count and out.shape == (heads, row_count, topk)
    assert page_table.dtype == out.dtype == torch.int32
    table_blocks = page_table.shape[1]
    head_stride = _padded(table_blocks)
    row_stride = heads * head_stride
    check_workspace(workspace, row_stride * SCORE_BYTES)
    scores = workspace[: workspace.numel() // SCORE_BYTES * SCORE_BYTES].view(torch.float32)
    rows_per_pass = scores.numel() // row_stride
    by_place = row_count > rows_per_pass
    for begin in range(0, row_count, rows_per_pass):
        end = min(begin + rows_per_pass, row_count)
        launch = launch_scores(
            index_q,
            index_k,
            page_table,
            rows,
            plan,
            scores,
            row_stride,
            head_stride,
            begin,
            end,
            by_place=by_place,
            skip_topk=topk,
        )
        launch_selection(
            scores,
            row_stride,
            head_stride,
            rows,
            plan.row_order,
            begin,
            end,
            table_blocks,
            topk=topk,
            init_blocks=init_blocks,
            local_blocks=local_blocks,
            out=out,
            by_place=by_place,
            early=launch.early,
        )
    return out


def compiled_variant(
    row_count: int, request_count: int, heads: int, table_blocks: int, workspace_bytes: int
) -> Hashable:
    """What the score kernel of such a step is compiled for: steps with equal answers share a kernel."""
    launch = pick_launch(row_count, request_count, heads, table_blocks)
    rows_per_pass = workspace_bytes // SCORE_BYTES // (heads * _padded(table_blocks))
    return (
        replace(launch, span_cost=0, programs_per_multiprocessor=0),
        padded_spans(request_count),
        row_count > rows_per_pass,
    )


def _padded(table_blocks: int) -> int:
    """Scores per (row, head), so that each begins on a cache sector and loads are vectors."""
    return -(-table_blocks // 16) * 16
