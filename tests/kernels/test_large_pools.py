"""Pools of more than 2^31 elements, as every real one: offsets into them need 64 bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from m3_kernels.rows import BLOCK_TOKENS
from torch import Tensor

from tests.kernels.cases import brute_attention, brute_selection
from tests.kernels.sm90 import DEVICE, REAL
from tests.kernels.test_sm90_attend_blocks import LONGEST_UNIONS, attend, check, extend_step, force, inputs

import m3_kernels.triton.sm90_attend_blocks as sm90  # isort: skip
from m3_kernels.triton.sm90_store_tokens import store_tokens  # isort: skip

pytestmark = pytest.mark.skipif(not REAL, reason="needs an sm90 GPU with 20 GB")
DIM = 128


def first_page_beyond(heads: int) -> int:
    """All elements of this page, and of those after it, lie beyond 2^31."""
    return (1 << 31) // (BLOCK_TOKENS * heads * DIM) + 17


def enlarged(pool: Tensor) -> Tensor:
    """The pool's pages at the end of a pool whose other pages hold NaN."""
    pages, _, heads, dim = pool.shape
    offset = first_page_beyond(heads)
    large = torch.full(
        (offset + pages, BLOCK_TOKENS, heads, dim), float("nan"), dtype=pool.dtype, device=DEVICE
    )
    large[offset:] = pool.to(DEVICE)
    return large


@pytest.mark.parametrize("heads", [(8, 1), (64, 4)], ids=str)
@pytest.mark.parametrize("route", ["decode", "dense", *LONGEST_UNIONS])
def test_attention_reads_pages_beyond_two_to_the_31_elements(
    heads: tuple[int, int], route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(8)
    step = extend_step(26, generator)
    q, k, v = inputs(step, heads, DIM, torch.bfloat16, generator)
    chosen = None
    if route != "dense":
        scores = torch.randn(heads[1], len(step.rows), step.page_table.shape[1], generator=generator)
        chosen = brute_selection(scores, step.rows, 4, 0, 1)
    if route in LONGEST_UNIONS:
        monkeypatch.setattr(sm90, "UNION_FROM_ROWS", 1)
        pass_rows = 3 * sm90.tiling(len(step.rows), *heads, DIM, 4).tile_rows
        force(monkeypatch, splits=1, pass_rows=pass_rows, longest_union=LONGEST_UNIONS[route])
    table = step.page_table + first_page_beyond(heads[1])
    moved = dataclasses.replace(step, page_table=table.int())
    got = attend(q, enlarged(k), enlarged(v), moved, chosen, 0.2)
    check(got, brute_attention(q, k.float(), v.float(), step, chosen, 0.2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_tokens_are_stored_beyond_two_to_the_31_elements(dtype: torch.dtype) -> None:
    heads, tokens = 4, 37
    pages = first_page_beyond(1) + 1
    generator = torch.Generator().manual_seed(9)
    k, v = (torch.randn(tokens, heads, DIM, generator=generator).bfloat16().to(DEVICE) for _ in range(2))
    index_k = torch.randn(tokens, 1, DIM, generator=generator).bfloat16().to(DEVICE)
    slots = (pages * BLOCK_TOKENS - 1 - torch.randperm(200, generator=generator)[:tokens]).to(DEVICE)
    # All three have the same number of pages; index pages are the smallest, and their last lies beyond.
    pools = [
        torch.empty(pages, BLOCK_TOKENS, count, DIM, dtype=dtype, device=DEVICE)
        for count in (heads, heads, 1)
    ]
    store_tokens(k, v, index_k, slots, *pools)
    for name, source, pool in zip(("k", "v", "index_k"), (k, v, index_k), pools):
        stored = pool.view(-1, *pool.shape[2:])[slots]
        wrong = (stored.float() != source.to(dtype).float()).nonzero()
        assert len(wrong) == 0, f"{name}: {len(wrong)} differ, first at {wrong[0].tolist()}"
