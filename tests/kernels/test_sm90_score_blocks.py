"""The sm90 scores against brute force, and the promise of equal bits for a row however it is scheduled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from m3_kernels.reference.plan_prefix import plan_prefix as reference_plan
from m3_kernels.rows import BLOCK_TOKENS, Rows

from tests.kernels.cases import UNREAD, Step, brute_scores, steps
from tests.kernels.sm90 import DEVICE, EXAMPLES, REAL, on_device, plan_of

from m3_kernels.triton.sm90_score_blocks import score_blocks  # isort: skip

NAN, INF = float("nan"), float("inf")


def scores_of(index_q: torch.Tensor, index_k: torch.Tensor, table: torch.Tensor, rows: Rows) -> torch.Tensor:
    out = torch.full((index_q.shape[1], len(rows), table.shape[1]), 77.0, device=DEVICE)
    return score_blocks(index_q, index_k, table, rows, plan_of(table, rows), out=out)


@settings(max_examples=EXAMPLES, deadline=None)
@given(steps(), st.integers(0, 2**31), st.sampled_from([1, 2, 4]), st.booleans())
def test_scores_equal_brute_force(step: Step, seed: int, heads: int, e4m3: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    index_q = torch.randn(len(step.rows), heads, 128 if REAL else 16, generator=generator).bfloat16()
    index_k = torch.randn(step.pages, BLOCK_TOKENS, 1, index_q.shape[2], generator=generator).bfloat16()
    if e4m3:
        index_k = index_k.to(torch.float8_e4m3fn)
    table, rows = on_device(step)
    got = scores_of(index_q.to(DEVICE), index_k.to(DEVICE), table, rows)
    expected = brute_scores(index_q, index_k, step)
    torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-5, atol=1e-4)


def test_nan_and_infinite_products_follow_the_rule() -> None:
    index_q = torch.ones(3, 1, 16, dtype=torch.bfloat16)
    index_q[1, 0, 3] = 0
    index_k = torch.full((4, BLOCK_TOKENS, 1, 16), -1.0, dtype=torch.bfloat16)
    index_k[0, :, 0, 0] = NAN  # a block of NaN alone
    index_k[1, 7, 0, 1] = NAN  # NaN among numbers
    index_k[2, 9, 0, 3] = INF  # infinite, and NaN for the row whose element there is 0
    index_k[3, 100:, 0, 0] = 50.0  # past the rows' positions
    step = Step(
        torch.tensor([[0, 1, 2, 3, UNREAD]], dtype=torch.int32),
        Rows(torch.zeros(3, dtype=torch.int32), torch.full((3,), 3 * BLOCK_TOKENS + 99, dtype=torch.int32)),
        4,
    )
    table, rows = on_device(step)
    got = scores_of(index_q.to(DEVICE), index_k.to(DEVICE), table, rows)[0].tolist()
    assert got[0] == [-INF, -16, INF, -16, -INF]
    assert got[1] == [-INF, -15, -15, -15, -INF]


@pytest.mark.parametrize(("heads", "row_count"), [(1, 300), (3, 130)])
def test_large_tiles_equal_brute_force_wherever_programs_begin(heads: int, row_count: int) -> None:
    """Many rows of one request: scores are stored several blocks at a time, in runs that begin anywhere."""
    generator = torch.Generator().manual_seed(row_count)
    blocks = 29
    table = torch.randperm(blocks, generator=generator).int()[None]
    first = (blocks - 3) * BLOCK_TOKENS - 50
    rows = Rows(torch.zeros(row_count, dtype=torch.int32), first + torch.arange(row_count).int())
    step = Step(table, rows, blocks)
    index_q = torch.randn(row_count, heads, 128 if REAL else 16, generator=generator).bfloat16()
    index_k = torch.randn(blocks, BLOCK_TOKENS, 1, index_q.shape[2], generator=generator).bfloat16()
    there, rows = on_device(step)
    got = scores_of(index_q.to(DEVICE), index_k.to(DEVICE), there, rows)
    torch.testing.assert_close(got.cpu().double(), brute_scores(index_q, index_k, step), rtol=1e-5, atol=1e-4)


def sharing_step(generator: torch.Generator, row_count: int) -> Step:
    shared, tail, requests = 9, 3, 5
    pages = shared + tail * requests
    table = torch.empty(requests, shared + tail, dtype=torch.int32)
    table[:, :shared] = torch.arange(shared)
    table[:, shared:] = torch.arange(shared, pages).reshape(requests, tail)
    request = torch.randint(0, requests, (row_count,), generator=generator, dtype=torch.int32)
    position = torch.randint(0, (shared + tail) * BLOCK_TOKENS, (row_count,), generator=generator).int()
    return Step(table, Rows(request, position), pages)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("row_count", [37, pytest.param(700, marks=() if REAL else pytest.mark.skip("slow"))])
def test_a_row_scores_the_same_bits_alone_in_a_batch_and_in_any_order(heads: int, row_count: int) -> None:
    generator = torch.Generator().manual_seed(7)
    step = sharing_step(generator, row_count)
    dim = 128 if REAL else 32
    index_q = torch.randn(row_count, heads, dim, generator=generator).bfloat16().to(DEVICE)
    index_k = torch.randn(step.pages, BLOCK_TOKENS, 1, dim, generator=generator).bfloat16().to(DEVICE)
    table, rows = on_device(step)
    everything = scores_of(index_q, index_k, table, rows)
    chosen = [torch.arange(row_count).flip(0), torch.randperm(row_count, generator=generator)[:11]]
    alone = range(row_count) if REAL else range(0, row_count, 9)
    for selected in [*chosen, *(torch.tensor([row]) for row in alone)]:
        there = selected.to(DEVICE)
        part = Rows(rows.request[there], rows.position[there])
        got = scores_of(index_q[there], index_k, table, part)
        assert torch.equal(got, everything[:, there]), f"rows {selected.tolist()[:5]} differ"


def test_the_reference_plan_gives_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(3)
    step = sharing_step(generator, 29)
    index_q = torch.randn(29, 2, 64, generator=generator).bfloat16().to(DEVICE)
    index_k = torch.randn(step.pages, BLOCK_TOKENS, 1, 64, generator=generator).bfloat16().to(DEVICE)
    table, rows = on_device(step)
    out = torch.empty(2, 29, table.shape[1], device=DEVICE)
    score_blocks(index_q, index_k, table, rows, reference_plan(table, rows), out=out)
    assert torch.equal(out, scores_of(index_q, index_k, table, rows))
