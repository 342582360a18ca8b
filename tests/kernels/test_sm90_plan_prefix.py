"""The sm90 plan against the reference plan, and its one promise on tables that are no prefix tree."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from m3_kernels.prefix_plan import PrefixPlan
from m3_kernels.reference.plan_prefix import plan_prefix as reference_plan
from m3_kernels.rows import BLOCK_TOKENS, Rows

from tests.kernels.cases import UNREAD, Step, steps
from tests.kernels.sm90 import DEVICE, EXAMPLES, REAL, on_device, plan_of


def assert_same_plan(got: PrefixPlan, expected: PrefixPlan) -> None:
    for field in dataclasses.fields(PrefixPlan):
        ours, theirs = getattr(got, field.name).cpu(), getattr(expected, field.name).cpu()
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), f"{field.name}: got {ours.tolist()}, expected {theirs.tolist()}"


@settings(max_examples=EXAMPLES, deadline=None)
@given(steps())
def test_plan_of_a_prefix_tree_equals_the_reference(step: Step) -> None:
    expected = reference_plan(step.page_table, step.rows)
    table, rows = on_device(step)
    assert_same_plan(plan_of(table, rows), expected)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(1, 7))
def test_spans_are_right_for_any_table_whatsoever(data: st.DataObject, requests: int, width: int) -> None:
    pages = st.lists(st.integers(0, 2), min_size=requests * width, max_size=requests * width)
    table = torch.tensor(data.draw(pages), dtype=torch.int32).reshape(requests, width)
    request = data.draw(st.lists(st.integers(-1, requests - 1), min_size=1, max_size=9))
    position = [data.draw(st.integers(0, width * BLOCK_TOKENS - 1)) for _ in request]
    rows = Rows(torch.tensor(request, dtype=torch.int32), torch.tensor(position, dtype=torch.int32))
    plan = plan_of(table.to(DEVICE), Rows(rows.request.to(DEVICE), rows.position.to(DEVICE)))
    order = plan.row_order.tolist()
    assert sorted(order) == list(range(len(request)))
    found: dict[tuple[int, int], int] = {}
    for first, count, start, length, source in zip(
        plan.first_block.tolist(),
        plan.block_count.tolist(),
        plan.row_start.tolist(),
        plan.row_count.tolist(),
        plan.page_request.tolist(),
    ):
        assert (count > 0) == (length > 0)
        for row in order[start : start + length]:
            for block in range(first, min(first + count, position[row] // BLOCK_TOKENS + 1)):
                assert (row, block) not in found, f"row {row} block {block} is in two spans"
                found[row, block] = int(table[source, block])
    expected = {
        (row, block): int(table[owner, block])
        for row, owner in enumerate(request)
        if owner >= 0
        for block in range(position[row] // BLOCK_TOKENS + 1)
    }
    assert found == expected


def tree_step(requests: int, shared: int, group: int, group_blocks: int, private: int) -> Step:
    """One decode row per request: blocks shared by all, then by groups, then private; lengths all odd."""
    generator = torch.Generator().manual_seed(requests)
    groups = -(-requests // group)
    width = shared + group_blocks + private + 3
    pages = shared + groups * group_blocks + requests * private
    number = torch.randperm(pages, generator=generator).int()
    table = torch.full((requests, width), UNREAD, dtype=torch.int32)
    position = []
    for request in range(requests):
        own = private - request % 3
        mine = shared + groups * group_blocks + request * private
        begin = shared + (request % groups) * group_blocks
        path = [*range(shared), *range(begin, begin + group_blocks), *range(mine, mine + own)]
        table[request, : len(path)] = number[path]
        position.append(len(path) * BLOCK_TOKENS - 1 - request % 100)
    rows = Rows(torch.arange(requests).int(), torch.tensor(position).int())
    return Step(table, rows, pages)


WIDE = [
    pytest.param((7, 11, 2, 3, 5), id="small"),
    pytest.param((33, 130, 5, 17, 4), id="across lanes"),
    pytest.param((64, 400, 8, 60, 9), id="batch 64", marks=() if REAL else pytest.mark.skip("slow")),
    pytest.param((256, 3000, 16, 1000, 31), id="batch 256", marks=() if REAL else pytest.mark.skip("slow")),
]


@pytest.mark.parametrize("shape", WIDE)
def test_three_level_trees_equal_the_reference(shape: tuple[int, int, int, int, int]) -> None:
    step = tree_step(*shape)
    table, rows = on_device(step)
    got = plan_of(table, rows)
    sizes = [len(step.rows), *(f.numel() for f in (got.first_block, got.counters))]
    assert sizes == [shape[0], 2 * shape[0] - 1, 3]
    # The reference's temporaries are [R, R, B]: on the GPU where that is large.
    assert_same_plan(got, reference_plan(table, rows))


def test_several_tiles_of_rows_keep_their_order() -> None:
    row_count = 5000
    request = torch.arange(row_count, dtype=torch.int32) * 7 % 4 - 1
    rows = Rows(request, torch.arange(row_count, dtype=torch.int32) % 300)
    table = torch.tensor([[5, 6, 7], [5, 6, 8], [5, 1, 2]], dtype=torch.int32)
    got = plan_of(table.to(DEVICE), Rows(rows.request.to(DEVICE), rows.position.to(DEVICE)))
    assert_same_plan(got, reference_plan(table, rows))
