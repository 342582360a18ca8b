"""Random steps over random prefix trees, and brute-force answers that share no code with the operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from m3_kernels.rows import BLOCK_TOKENS, Rows
from torch import Tensor

UNREAD = 1 << 30
"""Fills page table entries that no operator may read: far past any pool."""


@dataclass(frozen=True)
class Step:
    page_table: Tensor
    rows: Rows
    pages: int


@st.composite
def steps(draw: st.DrawFn, max_requests: int = 7, max_blocks: int = 9, max_rows: int = 40) -> Step:
    """A step of requests on a random prefix tree, rows in any order, some of them padding."""
    request_count = draw(st.integers(1, max_requests))
    tree: dict[tuple[int, ...], int] = {}
    tables: list[list[int]] = []
    for _ in range(request_count):
        table: list[int] = []
        path: tuple[int, ...] = ()
        for _ in range(draw(st.integers(1, max_blocks))):
            path = (*path, draw(st.integers(0, 1)))
            table.append(tree.setdefault(path, len(tree) + 1))
        tables.append(table)
    order = draw(st.permutations(range(len(tree) + 1)))
    width = max(map(len, tables)) + draw(st.integers(0, 2))
    request, position = [], []
    for _ in range(draw(st.integers(1, max_rows))):
        owner = draw(st.integers(-1, request_count - 1))
        request.append(owner)
        limit = len(tables[owner]) * BLOCK_TOKENS - 1 if owner >= 0 else 0
        position.append(draw(st.integers(0, limit)) if owner >= 0 else UNREAD)
    page_table = torch.full((request_count, width), UNREAD, dtype=torch.int32)
    for number, table in enumerate(tables):
        last = max((p // BLOCK_TOKENS for r, p in zip(request, position) if r == number), default=-1)
        for block in range(last + 1):
            page_table[number, block] = order[table[block]]
    rows = Rows(torch.tensor(request, dtype=torch.int32), torch.tensor(position, dtype=torch.int32))
    return Step(page_table, rows, len(tree) + 1)


def brute_scores(index_q: Tensor, index_k: Tensor, step: Step) -> Tensor:
    """`[H, T, B]` float64 scores, one row and block at a time."""
    row_count, heads, _ = index_q.shape
    out = torch.full((heads, row_count, step.page_table.shape[1]), float("-inf"), dtype=torch.float64)
    for row in range(row_count):
        request, position = int(step.rows.request[row]), int(step.rows.position[row])
        if request < 0:
            continue
        for block in range(position // BLOCK_TOKENS + 1):
            tokens = min(BLOCK_TOKENS, position - block * BLOCK_TOKENS + 1)
            keys = index_k[int(step.page_table[request, block]), :tokens, 0].double()
            products = index_q[row].double() @ keys.T
            products[products.isnan()] = float("-inf")
            out[:, row, block] = products.amax(-1)
    return out


def brute_selection(scores: Tensor, rows: Rows, topk: int, init_blocks: int, local_blocks: int) -> Tensor:
    """The chosen blocks by sorting Python tuples."""
    heads, row_count, _ = scores.shape
    out = torch.full((heads, row_count, topk), -1, dtype=torch.int32)
    for head in range(heads):
        for row in range(row_count):
            if rows.request[row] < 0:
                continue
            own = int(rows.position[row]) // BLOCK_TOKENS

            def key(block: int, head: int = head, row: int = row, own: int = own) -> tuple[int, float, int]:
                if block < init_blocks or block > own - local_blocks:
                    return (0, 0.0, block)
                score = float(scores[head, row, block])
                return (2, 0.0, block) if score != score else (1, -score, block)

            best = sorted(sorted(range(own + 1), key=key)[:topk])
            out[head, row, : len(best)] = torch.tensor(best, dtype=torch.int32)
    return out


def brute_attention(
    q: Tensor, k: Tensor, v: Tensor, step: Step, chosen: Tensor | None, scale: float
) -> Tensor:
    """`[T, Hq, D]` float64 attention, one row and head at a time; zeros for padding and without blocks."""
    row_count, q_heads, _ = q.shape
    group = q_heads // k.shape[2]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row in range(row_count):
        request, position = int(step.rows.request[row]), int(step.rows.position[row])
        if request < 0:
            continue
        for head in range(q_heads):
            kv_head = head // group
            blocks = range(position // BLOCK_TOKENS + 1)
            if chosen is not None:
                blocks = [b for b in chosen[kv_head, row].tolist() if b >= 0]
            if not blocks:
                continue
            keys, values = [], []
            for block in blocks:
                tokens = min(BLOCK_TOKENS, position - block * BLOCK_TOKENS + 1)
                page = int(step.page_table[request, block])
                keys.append(k[page, :tokens, kv_head].double())
                values.append(v[page, :tokens, kv_head].double())
            weights = (torch.cat(keys) @ q[row, head].double() * scale).softmax(-1)
            out[row, head] = weights @ torch.cat(values)
    return out
