"""The reference operators of selection against brute force on random prefix trees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from m3_kernels.reference.choose_blocks import choose_blocks
from m3_kernels.reference.plan_prefix import plan_prefix
from m3_kernels.reference.score_blocks import score_blocks
from m3_kernels.reference.select_blocks import select_blocks
from m3_kernels.rows import BLOCK_TOKENS, Rows

from tests.kernels.cases import Step, brute_scores, brute_selection, steps

NAN, INF = float("nan"), float("inf")


@settings(max_examples=150, deadline=None)
@given(steps())
def test_every_visible_pair_is_in_exactly_one_span_and_spans_share_pages(step: Step) -> None:
    plan = plan_prefix(step.page_table, step.rows)
    seen: dict[tuple[int, int], int] = {}
    loaded = 0
    assert sorted(plan.row_order.tolist()) == list(range(len(step.rows)))
    for slot in range(plan.first_block.shape[0]):
        first, count = int(plan.first_block[slot]), int(plan.block_count[slot])
        begin, length = int(plan.row_start[slot]), int(plan.row_count[slot])
        assert (count > 0) == (length > 0), f"slot {slot}: {count} blocks, {length} rows"
        loaded += count
        for row in plan.row_order[begin : begin + length].tolist():
            request, position = int(step.rows.request[row]), int(step.rows.position[row])
            assert request >= 0, f"padded row {row} is in span {slot}"
            for block in range(first, first + count):
                if block > position // BLOCK_TOKENS:
                    continue
                seen[row, block] = seen.get((row, block), 0) + 1
                page = step.page_table[int(plan.page_request[slot]), block]
                assert page == step.page_table[request, block], f"row {row} block {block}: another page"
    visible = {
        (row, block)
        for row in range(len(step.rows))
        if step.rows.request[row] >= 0
        for block in range(int(step.rows.position[row]) // BLOCK_TOKENS + 1)
    }
    assert set(seen) == visible and set(seen.values()) <= {1}
    blocks_of = {}
    for row, block in visible:
        request = int(step.rows.request[row])
        blocks_of[request] = max(blocks_of.get(request, 0), block + 1)
    pages = {int(step.page_table[r, b]) for r, n in blocks_of.items() for b in range(n)}
    expected = [len(pages), sum(blocks_of.values()) - len(pages), int((step.rows.request >= 0).sum())]
    assert loaded == len(pages), f"{loaded} pages loaded, {len(pages)} distinct"
    assert plan.counters.tolist() == expected


@settings(max_examples=60, deadline=None)
@given(steps(), st.integers(0, 2**31), st.sampled_from([1, 2, 3]))
def test_scores_equal_brute_force(step: Step, seed: int, heads: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    index_q = torch.randn(len(step.rows), heads, 24, generator=generator)
    index_k = torch.randn(step.pages, BLOCK_TOKENS, 1, 24, generator=generator)
    index_k[0, 5] = float("nan")
    out = torch.full((heads, len(step.rows), step.page_table.shape[1]), 77.0)
    plan = plan_prefix(step.page_table, step.rows)
    score_blocks(index_q, index_k, step.page_table, step.rows, plan, out=out)
    torch.testing.assert_close(out.double(), brute_scores(index_q, index_k, step), rtol=1e-5, atol=1e-5)


@settings(max_examples=150, deadline=None)
@given(st.data(), steps(), st.integers(1, 6))
def test_selection_with_ties_nan_and_padding_equals_brute_force(
    data: st.DataObject, step: Step, topk: int
) -> None:
    init_blocks = data.draw(st.integers(0, topk))
    local_blocks = data.draw(st.integers(0, topk - init_blocks))
    shape = (2, len(step.rows), step.page_table.shape[1])
    count = shape[0] * shape[1] * shape[2]
    drawn = data.draw(st.randoms(use_true_random=False))
    values = [drawn.choice([0.0, -0.0, 1.0, 1.0, -2.0, NAN, INF, -INF]) for _ in range(count)]
    scores = torch.tensor(values).reshape(shape)
    forced = {"topk": topk, "init_blocks": init_blocks, "local_blocks": local_blocks}
    out = torch.full((2, len(step.rows), topk), 99, dtype=torch.int32)
    select_blocks(scores, step.rows, **forced, out=out)
    expected = brute_selection(scores, step.rows, topk, init_blocks, local_blocks)
    assert torch.equal(out, expected), f"got {out.tolist()}\nexpected {expected.tolist()}"


def test_forced_blocks_that_do_not_fit_are_refused() -> None:
    rows = Rows(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    out = torch.empty(1, 1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="topk"):
        select_blocks(torch.zeros(1, 1, 1), rows, topk=2, init_blocks=1, local_blocks=2, out=out)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_scores_the_same_bits_alone_in_a_batch_and_in_any_order(
    heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(7)
    shared, tail, requests = 9, 3, 5
    pages = shared + tail * requests
    page_table = torch.empty(requests, shared + tail, dtype=torch.int32)
    page_table[:, :shared] = torch.arange(shared)
    page_table[:, shared:] = torch.arange(shared, pages).reshape(requests, tail)
    row_count = 37
    request = torch.randint(0, requests, (row_count,), generator=generator, dtype=torch.int32)
    position = torch.randint(0, (shared + tail) * BLOCK_TOKENS, (row_count,), generator=generator).int()
    index_q = torch.randn(row_count, heads, head_dim, generator=generator).to(dtype)
    index_k = torch.randn(pages, BLOCK_TOKENS, 1, head_dim, generator=generator).to(dtype)

    def score(selected: torch.Tensor) -> torch.Tensor:
        rows = Rows(request[selected], position[selected])
        out = torch.empty(heads, len(selected), page_table.shape[1])
        plan = plan_prefix(page_table, rows)
        return score_blocks(index_q[selected], index_k, page_table, rows, plan, out=out)

    everything = score(torch.arange(row_count))
    for selected in (torch.arange(row_count).flip(0), torch.randperm(row_count, generator=generator)[:11]):
        assert torch.equal(score(selected), everything[:, selected])
    for row in range(row_count):
        alone = score(torch.tensor([row]))[:, 0]
        assert torch.equal(alone, everything[:, row]), f"row {row} differs: {alone} {everything[:, row]}"


@settings(max_examples=30, deadline=None)
@given(steps(), st.integers(0, 2**31))
def test_choosing_is_scoring_then_selecting(step: Step, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    index_q = torch.randn(len(step.rows), 2, 16, generator=generator).bfloat16()
    index_k = torch.randn(step.pages, BLOCK_TOKENS, 1, 16, generator=generator).bfloat16()
    plan = plan_prefix(step.page_table, step.rows)
    out = torch.empty(2, len(step.rows), 3, dtype=torch.int32)
    choose_blocks(
        index_q, index_k, step.page_table, step.rows, plan, topk=3, init_blocks=1, local_blocks=1, out=out
    )
    scores = torch.empty(2, len(step.rows), step.page_table.shape[1])
    score_blocks(index_q, index_k, step.page_table, step.rows, plan, out=scores)
    assert torch.equal(out, brute_selection(scores, step.rows, 3, 1, 1))
