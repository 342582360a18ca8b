"""The sm90 selection against brute force: ties, NaN, infinities, forced blocks, padding, wide rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from m3_kernels.reference.select_blocks import select_blocks as reference_selection
from m3_kernels.rows import BLOCK_TOKENS, Rows

from tests.kernels.cases import Step, brute_selection, steps
from tests.kernels.sm90 import DEVICE, EXAMPLES, REAL, on_device

from m3_kernels.triton.sm90_select_blocks import select_blocks  # isort: skip

NAN, INF = float("nan"), float("inf")
SPECIAL = [0.0, -0.0, 1.0, 1.0, -2.0, 1e-45, -1e-45, 3.4e38, NAN, -NAN, INF, -INF]


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data(), steps(max_rows=12), st.integers(1, 6))
def test_selection_with_ties_nan_and_padding_equals_brute_force(
    data: st.DataObject, step: Step, topk: int
) -> None:
    init_blocks = data.draw(st.integers(0, topk))
    local_blocks = data.draw(st.integers(0, topk - init_blocks))
    drawn = data.draw(st.randoms(use_true_random=False))
    shape = (2, len(step.rows), step.page_table.shape[1])
    count = shape[0] * shape[1] * shape[2]
    scores = torch.tensor([drawn.choice(SPECIAL) for _ in range(count)]).reshape(shape)
    out = torch.full((2, len(step.rows), topk), 99, dtype=torch.int32, device=DEVICE)
    _, rows = on_device(step)
    select_blocks(
        scores.to(DEVICE), rows, topk=topk, init_blocks=init_blocks, local_blocks=local_blocks, out=out
    )
    expected = brute_selection(scores, step.rows, topk, init_blocks, local_blocks)
    assert torch.equal(out.cpu(), expected), f"got {out.tolist()}\nexpected {expected.tolist()}"


@pytest.mark.parametrize("blocks", [17, 512, 1025, 8192, pytest.param(20_001, id="2.5M tokens")])
@pytest.mark.parametrize("distinct", [2, 60, 1 << 20])
def test_wide_rows_equal_the_reference(blocks: int, distinct: int) -> None:
    generator = torch.Generator().manual_seed(blocks)
    row_count = 400 if REAL else 5
    values = torch.randn(distinct, generator=generator)
    scores = values[torch.randint(0, distinct, (3, row_count, blocks), generator=generator)].to(DEVICE)
    position = torch.randint(0, blocks * BLOCK_TOKENS, (row_count,), generator=generator).int()
    position[:2] = torch.tensor([blocks * BLOCK_TOKENS - 1, 5])
    request = torch.zeros(row_count, dtype=torch.int32)
    request[3] = -1
    rows = Rows(request.to(DEVICE), position.to(DEVICE))
    past = torch.arange(blocks, device=DEVICE) > (rows.position // BLOCK_TOKENS)[:, None]
    scores = scores.masked_fill(past, INF)  # entries past a row's own block must not matter
    forced = {"topk": 16, "init_blocks": 1, "local_blocks": 2}
    out = torch.full((3, row_count, 16), 99, dtype=torch.int32, device=DEVICE)
    expected = torch.empty_like(out)
    select_blocks(scores, rows, **forced, out=out)
    reference_selection(scores, rows, **forced, out=expected)
    wrong = (out != expected).any(-1).nonzero()
    assert len(wrong) == 0, f"{len(wrong)} rows differ, first {wrong[0].tolist()}: {out[tuple(wrong[0])]}"


@pytest.mark.parametrize("blocks", [301, 1100, 8193])
@pytest.mark.parametrize(
    ("topk", "init_blocks", "local_blocks"), [(40, 0, 1), (255, 3, 0), (16, 15, 1), (1, 0, 0)]
)
def test_many_few_and_forced_blocks_alone_equal_the_reference(
    blocks: int, topk: int, init_blocks: int, local_blocks: int
) -> None:
    generator = torch.Generator().manual_seed(topk)
    scores = torch.randn(2, 5, blocks, generator=generator).round(decimals=1).to(DEVICE)
    last = torch.tensor([blocks - 1, blocks - 2, 41, 17, 0]) * BLOCK_TOKENS
    rows = Rows(torch.zeros(5, dtype=torch.int32, device=DEVICE), (last + 127).int().to(DEVICE))
    forced = {"topk": topk, "init_blocks": init_blocks, "local_blocks": local_blocks}
    out = torch.full((2, 5, topk), 99, dtype=torch.int32, device=DEVICE)
    expected = torch.empty_like(out)
    select_blocks(scores, rows, **forced, out=out)
    reference_selection(scores, rows, **forced, out=expected)
    assert torch.equal(out, expected), f"got {out.tolist()}\nexpected {expected.tolist()}"


@pytest.mark.parametrize("blocks", [1025, 4100, 8193])
def test_wide_rows_of_special_values_equal_the_reference(blocks: int) -> None:
    """Few numbers among NaN and infinities; equal ones side by side, far apart and just past the end."""
    generator = torch.Generator().manual_seed(blocks)
    values = torch.tensor(SPECIAL)
    scores = torch.full((4, 6, blocks), NAN)
    for head, count in enumerate((3, 40, 700, blocks)):
        for row in range(6):
            there = torch.randperm(blocks, generator=generator)[:count]
            scores[head, row, there] = values[torch.randint(0, len(SPECIAL), (count,), generator=generator)]
    scores[:, 1, 1000:1024] = 3.4e38  # more equal ones than are chosen, side by side
    scores[:, 2, ::61] = 3.4e38  # and far apart
    position = torch.randint(1024, blocks, (6,), generator=generator) * BLOCK_TOKENS
    rows = Rows(torch.zeros(6, dtype=torch.int32).to(DEVICE), position.int().to(DEVICE))
    past = torch.arange(blocks) > (position // BLOCK_TOKENS)[:, None]
    scores = scores.masked_fill(past, INF).to(DEVICE)
    for init_blocks, local_blocks in ((0, 1), (2, 3), (0, 0)):
        forced = {"topk": 16, "init_blocks": init_blocks, "local_blocks": local_blocks}
        out = torch.full((4, 6, 16), 99, dtype=torch.int32, device=DEVICE)
        expected = torch.empty_like(out)
        select_blocks(scores, rows, **forced, out=out)
        reference_selection(scores, rows, **forced, out=expected)
        wrong = (out != expected).any(-1).nonzero()
        assert len(wrong) == 0, f"{wrong.tolist()}: {out[tuple(wrong[0])]} not {expected[tuple(wrong[0])]}"


def test_forced_blocks_that_do_not_fit_are_refused() -> None:
    rows = Rows(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    out = torch.empty(1, 1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="topk"):
        select_blocks(torch.zeros(1, 1, 1), rows, topk=2, init_blocks=1, local_blocks=2, out=out)


def test_more_blocks_than_the_kernel_counts_are_refused_by_number() -> None:
    rows = Rows(torch.zeros(1, dtype=torch.int32), torch.full((1,), 512 * BLOCK_TOKENS, dtype=torch.int32))
    out = torch.empty(1, 1, 256, dtype=torch.int32)
    with pytest.raises(ValueError, match="at most 255 blocks of a row, not topk 256"):
        select_blocks(torch.zeros(1, 1, 513), rows, topk=256, init_blocks=0, local_blocks=1, out=out)
