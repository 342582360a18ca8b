"""The step that a prefill graph reads is refilled in place and means what an eager step means."""

from __future__ import annotations

from types import SimpleNamespace

import m3_kernels
import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_m3.attention.prefill_graph import MOST_REQUESTS, PrefillGraphSteps
from sglang_m3.attention.step import Step, longest_of, make_step
from sglang_m3.attention.workspace import StepShape

PAGE, BLOCKS, PAGES, TOPK, HEADS, DIM = 128, 9, 40, 3, 2, 16
SHAPE = StepShape(
    rows=300, requests=5, blocks=BLOCKS, pages=PAGES,
    q_heads=4, kv_heads=HEADS, index_heads=HEADS, head_dim=DIM, topk=TOPK,
)  # fmt: skip
# (request slots, cached tokens, new tokens), and the graph's rows. Slots 1 and 2 share their first pages. The
# second batch is smaller in every way than the first, whose leftovers it finds; the third is longer again.
BATCHES = [
    (([1, 2, 4], [900, 640, 0], [150, 129, 20]), 300),
    (([3], [256], [5]), 16),
    (([2, 1], [1024, 128], [100, 27]), 127),
    (([4], [0], [1]), 1),
]


def batch(slots: list[int], cached: list[int], new: list[int]) -> SimpleNamespace:
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        positions=torch.cat([torch.arange(start, start + count) for start, count in zip(cached, new)]),
        req_pool_indices=torch.tensor(slots),
        seq_lens_cpu=torch.tensor(cached) + torch.tensor(new),
        extend_seq_lens=torch.tensor(new),
        extend_seq_lens_cpu=new,
    )


@pytest.fixture
def req_to_token() -> torch.Tensor:
    pages = torch.stack([torch.arange(BLOCKS) + slot * 7 for slot in range(5)])
    pages[2, :4] = pages[1, :4]
    return (pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1).int()


def choose(step: Step, index_q: torch.Tensor, index_k: torch.Tensor) -> torch.Tensor:
    out = torch.full((HEADS, len(step.rows), TOPK), -7, dtype=torch.int32)
    return m3_kernels.choose_blocks(
        index_q, index_k, step.page_table, step.rows, step.plan,
        topk=TOPK, init_blocks=0, local_blocks=1, workspace=torch.empty(0, dtype=torch.uint8), out=out,
    )  # fmt: skip


def test_a_refilled_step_chooses_what_an_eager_one_does_whatever_was_in_the_buffers(
    req_to_token: torch.Tensor,
) -> None:
    torch.manual_seed(5)
    steps = PrefillGraphSteps(SHAPE, None, "cpu")
    index_k = torch.randn(PAGES, PAGE, 1, DIM)
    for content, tokens in BATCHES:
        forward_batch = batch(*content)
        eager = make_step(forward_batch, req_to_token, longest=longest_of(forward_batch), workspace=None)
        step = steps.refill(forward_batch, req_to_token, tokens)
        real = len(eager.rows)
        index_q = torch.randn(tokens, HEADS, DIM)
        got, want = choose(step, index_q, index_k), choose(eager, index_q[:real], index_k)
        assert torch.equal(got[:, :real], want), (content, (got[:, :real] != want).nonzero())
        assert (step.rows.request[real:] == -1).all() and len(step.rows) == tokens
        assert step.plan.counters.tolist() == eager.plan.counters.tolist(), content
        attended = m3_kernels.attend_blocks(
            torch.randn(tokens, 4, DIM), index_k.expand(-1, -1, HEADS, -1), index_k.expand(-1, -1, HEADS, -1),
            step.page_table, step.rows, got,
            scale=1.0, workspace=torch.empty(0, dtype=torch.uint8), out=torch.full((tokens, 4, DIM), 9.0),
        )  # fmt: skip
        assert (attended[real:] == 0).all() and (attended[:real] != 0).all(), content


def test_a_graph_finds_every_later_step_where_it_was_captured(req_to_token: torch.Tensor) -> None:
    steps = PrefillGraphSteps(SHAPE, None, "cpu")
    # The reference plan allocates; the kernels' lies in their workspace (`plan_prefix`).
    plan = SimpleNamespace()
    content, tokens = BATCHES[0]
    first, later = (
        Step(step.page_table, step.rows, plan)
        for step in (
            steps.refill(batch(*content), req_to_token, tokens),
            steps.refill(batch([3], [0], [2]), req_to_token, tokens),
        )
    )
    assert later.same_memory(first)
    smaller = steps.refill(batch([3], [0], [2]), req_to_token, tokens - 1)
    assert not Step(smaller.page_table, smaller.rows, plan).same_memory(first)
    assert steps.chosen(tokens).data_ptr() == steps.chosen(3).data_ptr()
    assert steps.chosen(3).shape == (HEADS, 3, TOPK) and steps.chosen(3).is_contiguous()


def test_a_batch_that_no_graph_holds_is_not_squeezed_in(req_to_token: torch.Tensor) -> None:
    steps = PrefillGraphSteps(SHAPE, None, "cpu")
    assert steps.requests == 5 < MOST_REQUESTS
    for slots, tokens in (([3], 2), ([1, 2, 3, 4, 1, 2], 60), ([3], SHAPE.rows + 1)):
        with pytest.raises(AssertionError):
            steps.refill(batch(slots, [0] * len(slots), [3] * len(slots)), req_to_token, tokens)
