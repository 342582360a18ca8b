"""A forward batch of SGLang in the operators' terms."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_m3.attention.counters import SelectionCounters, SelectionTotals
from sglang_m3.attention.step import Step, longest_of, make_step

PAGE = 128


@pytest.fixture
def req_to_token() -> torch.Tensor:
    """Five request slots; request slots 4 and 1 share pages 7 and 9, then go their own ways."""
    pages = {4: [7, 9, 2, 5], 1: [7, 9, 3], 2: [11]}
    table = torch.zeros(5, 4 * PAGE, dtype=torch.int32)
    for slot, own in pages.items():
        for block, page in enumerate(own):
            table[slot, block * PAGE : (block + 1) * PAGE] = torch.arange(page * PAGE, (page + 1) * PAGE)
    return table


def batch(mode: ForwardMode, slots: list[int], prefix: list[int], lengths: list[int]) -> SimpleNamespace:
    positions = torch.cat([torch.arange(p, p + n) for p, n in zip(prefix, lengths)])
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=len(slots),
        positions=positions,
        req_pool_indices=torch.tensor(slots),
        seq_lens_cpu=torch.tensor(prefix) + torch.tensor(lengths),
        extend_seq_lens=torch.tensor(lengths),
        extend_seq_lens_cpu=lengths,
    )


def step_of(forward_batch: SimpleNamespace, req_to_token: torch.Tensor) -> Step:
    return make_step(forward_batch, req_to_token, longest=longest_of(forward_batch), workspace=None)


def test_a_decode_step_has_a_row_per_request_and_shares_the_common_pages(req_to_token: torch.Tensor) -> None:
    step = step_of(batch(ForwardMode.DECODE, [4, 1, 2], [400, 300, 5], [1, 1, 1]), req_to_token)
    assert step.rows.request.tolist() == [0, 1, 2]
    assert step.rows.position.tolist() == [400, 300, 5]
    assert step.page_table[0].tolist() == [7, 9, 2, 5]
    assert step.page_table[1, :3].tolist() == [7, 9, 3]
    counters = SelectionCounters("cpu")
    counters.count(step.plan)
    counters.count(step.plan)
    # Pages 7 and 9 once, then 2, 5, 3 and 11.
    assert counters.read() == SelectionTotals(pages_scored=12, pages_saved=4, rows=6)


def test_rows_that_sglang_padded_a_graphs_batch_with_are_not_counted(req_to_token: torch.Tensor) -> None:
    padded = batch(ForwardMode.DECODE, [4, 1, 0, 0], [400, 300, 0, 0], [1, 1, 1, 1])
    step = make_step(padded, req_to_token, longest=512, workspace=None)
    assert step.rows.request.tolist() == [0, 1, -1, -1]
    assert step.plan.counters.tolist() == [5, 2, 2]


def test_a_verify_step_has_a_row_per_draft_token_and_pages_for_the_whole_draft(
    req_to_token: torch.Tensor,
) -> None:
    verify = batch(ForwardMode.TARGET_VERIFY, [1, 0, 4], [254, 0, 126], [3, 3, 3])
    # SGLang's lengths end where the draft begins.
    verify.seq_lens_cpu = torch.tensor([254, 1, 126])
    verify.spec_info = SimpleNamespace(draft_token_num=3)
    step = step_of(verify, req_to_token)
    assert step.rows.request.tolist() == [0, 0, 0, -1, -1, -1, 2, 2, 2]
    assert step.rows.position.tolist() == [254, 255, 256, 0, 1, 2, 126, 127, 128]
    alone = batch(ForwardMode.TARGET_VERIFY, [4], [300], [3])
    alone.spec_info = SimpleNamespace(draft_token_num=3)
    assert step_of(alone, req_to_token).rows.request.tolist() == [0, 0, 0]
    assert step.page_table.shape == (3, 3)


def test_an_extend_step_has_a_row_per_new_token(req_to_token: torch.Tensor) -> None:
    step = step_of(batch(ForwardMode.EXTEND, [1, 2], [256, 0], [3, 2]), req_to_token)
    assert step.rows.request.tolist() == [0, 0, 0, 1, 1]
    assert step.rows.position.tolist() == [256, 257, 258, 0, 1]
    assert step.page_table.shape == (2, 3)
