"""Compile the operators before the first request."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterator

import m3_kernels
import torch
from m3_kernels.rows import BLOCK_TOKENS, Rows

from sglang_m3.attention.parameters import SelectionParameters
from sglang_m3.attention.pool import LayerPages
from sglang_m3.attention.step import table_sizes
from sglang_m3.attention.workspace import StepShape, Workspaces, bytes_needed

logger = logging.getLogger(__name__)


def step_sizes(shape: StepShape) -> Iterator[tuple[int, int, int]]:
    """(requests, rows, blocks) of steps that between them need every variant of the kernels.

    Variants differ by the width of the page table, by the power of two above the number of requests and of
    rows, and by whether the number of rows is a multiple of 16. Scores are launched by rows for each request
    as well: further steps follow for what `compiled_variant` tells apart and no step before them needs.
    """
    # Triton is imported where kernels run, and nowhere else.
    from m3_kernels.triton.sm90_choose_blocks import compiled_variant
    from m3_kernels.triton.sm90_score_blocks import COLUMN_CLASSES, SMALL_TILE_COLUMNS

    workspace_bytes = bytes_needed(shape)[1]
    for tokens in table_sizes(shape.blocks * BLOCK_TOKENS):
        blocks, met = tokens // BLOCK_TOKENS, set()

        def variant(requests: int, rows: int) -> Hashable:
            return compiled_variant(rows, requests, shape.index_heads, blocks, workspace_bytes)  # noqa: B023

        most = min(shape.rows, tokens)
        for requests in _powers(shape.requests):
            for rows in row_counts(most):
                if rows >= requests:
                    met.add(variant(requests, rows))
                    yield requests, rows, blocks
        for requests in request_counts(shape.requests):
            edges = [
                columns // shape.index_heads for columns in (*COLUMN_CLASSES, SMALL_TILE_COLUMNS * requests)
            ]
            near = {row for edge in edges for row in (edge - 1, edge, edge + 1, edge // 16 * 16 + 16)}
            for rows in sorted(near.union(row_counts(most))):
                if requests <= rows <= most and variant(requests, rows) not in met:
                    met.add(variant(requests, rows))
                    yield requests, rows, blocks


def _powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length())]


def request_counts(most: int) -> list[int]:
    """Powers of two up to `most`, what lies one above each, and the last: the ends of every class."""
    above = {power + 1 for power in _powers(most)}
    return sorted(count for count in {*_powers(most), *above, most} if count <= most)


def row_counts(most: int) -> list[int]:
    """Powers of two up to `most`, what lies one below each, and the last of either kind."""
    pairs = {count for power in _powers(most) for count in (power - 1, power)}
    return sorted((pairs | {most, most // 16 * 16}) - {0})


def warm_up(
    shape: StepShape,
    parameters: SelectionParameters,
    pages: LayerPages,
    workspaces: Workspaces,
    dtype: torch.dtype,
) -> None:
    """Run all operators on a step of every size class; the pool is not changed.

    Triton keeps what it compiles on disk, so the next start is quick.
    """
    begin = time.monotonic()
    device = pages.k.device
    logger.info("sglang-m3: compiling the operators, which takes about a minute the first time ...")
    for requests, rows, blocks in step_sizes(shape):
        _run(shape, parameters, pages, workspaces, dtype, requests, rows, blocks)
    torch.cuda.synchronize(device)
    logger.info("sglang-m3: operators ready after %.1f s", time.monotonic() - begin)


def _run(
    shape: StepShape,
    parameters: SelectionParameters,
    pages: LayerPages,
    workspaces: Workspaces,
    dtype: torch.dtype,
    requests: int,
    rows: int,
    blocks: int,
) -> None:
    device = pages.k.device
    # The last tokens of as many requests, all of them on the page that SGLang pads with.
    number = torch.arange(rows, dtype=torch.int32, device=device)
    last = blocks * BLOCK_TOKENS - 1
    step = Rows(number % requests, last - (rows - 1 - number) // requests)
    page_table = torch.zeros(requests, blocks, dtype=torch.int32, device=device)
    plan = m3_kernels.plan_prefix(page_table, step, workspace=workspaces.plan)

    def zeros(heads: int) -> torch.Tensor:
        return torch.zeros(rows, heads, shape.head_dim, dtype=dtype, device=device)

    no_slot = torch.full((rows,), -1, dtype=torch.int64, device=device)
    key_value = zeros(shape.kv_heads)
    m3_kernels.store_tokens(key_value, key_value, zeros(1), no_slot, pages.k, pages.v, pages.index_k)
    chosen = torch.empty(shape.index_heads, rows, parameters.topk, dtype=torch.int32, device=device)
    m3_kernels.choose_blocks(
        zeros(shape.index_heads),
        pages.index_k,
        page_table,
        step,
        plan,
        topk=parameters.topk,
        init_blocks=parameters.init_blocks,
        local_blocks=parameters.local_blocks,
        workspace=workspaces.choose,
        out=chosen,
    )
    q = zeros(shape.q_heads)
    # Dense attention to a long context would take its time, and needs the same kernels for a short one.
    short = Rows(step.request, number // requests)
    for tokens, blocks_of_rows in ((step, chosen), (short, None)):
        m3_kernels.attend_blocks(
            q,
            pages.k,
            pages.v,
            page_table,
            tokens,
            blocks_of_rows,
            scale=1.0,
            workspace=workspaces.attend,
            out=torch.empty_like(q),
        )
