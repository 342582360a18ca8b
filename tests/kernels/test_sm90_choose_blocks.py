"""The sm90 choice: equal to scoring then selecting, in any number of passes, in graphs, in huge pools."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from m3_kernels.prefix_plan import PrefixPlan
from m3_kernels.rows import BLOCK_TOKENS, Rows
from torch import Tensor

from tests.kernels.cases import Step, brute_selection, steps
from tests.kernels.sm90 import DEVICE, EXAMPLES, REAL, on_device, plan_of, poisoned

from m3_kernels.triton.sm90_choose_blocks import choose_blocks, choose_blocks_workspace_bytes  # isort: skip
from m3_kernels.triton.sm90_plan_prefix import plan_prefix, plan_prefix_workspace_bytes  # isort: skip
from m3_kernels.triton.sm90_score_blocks import score_blocks  # isort: skip
from m3_kernels.triton.sm90_select_blocks import select_blocks  # isort: skip
from m3_kernels.triton.sm90_store_tokens import store_tokens  # isort: skip

DIM = 128 if REAL else 16
gpu_only = pytest.mark.skipif(not REAL, reason="needs an sm90 GPU")


def inputs(step: Step, heads: int, seed: int, copies: int = 1) -> tuple[Tensor, Tensor]:
    """Random index queries and pages; with `copies` above 1 several pages hold the same keys (ties)."""
    generator = torch.Generator().manual_seed(seed)
    index_q = torch.randn(len(step.rows), heads, DIM, generator=generator).bfloat16()
    distinct = -(-step.pages // copies)
    index_k = torch.randn(distinct, BLOCK_TOKENS, 1, DIM, generator=generator).bfloat16()
    return index_q.to(DEVICE), index_k.repeat(copies, 1, 1, 1)[: step.pages].to(DEVICE)


def choose(
    index_q: Tensor, index_k: Tensor, table: Tensor, rows: Rows, plan: PrefixPlan, size: int, **forced: int
) -> Tensor:
    out = torch.full((index_q.shape[1], len(rows), forced["topk"]), 99, dtype=torch.int32, device=DEVICE)
    return choose_blocks(
        index_q, index_k, table, rows, plan, **forced, workspace=poisoned(size).fill_(255), out=out
    )


@settings(max_examples=EXAMPLES, deadline=None)
@given(steps(), st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 3), st.integers(1, 50))
def test_choosing_is_scoring_then_selecting_in_any_number_of_passes(
    step: Step, seed: int, heads: int, copies: int, rows_per_pass: int
) -> None:
    index_q, index_k = inputs(step, heads, seed, copies)
    table, rows = on_device(step)
    plan = plan_of(table, rows)
    forced = {"topk": 3, "init_blocks": 1, "local_blocks": 1}
    row_bytes = choose_blocks_workspace_bytes(1, heads, table.shape[1])
    got = choose(index_q, index_k, table, rows, plan, row_bytes * rows_per_pass, **forced)
    scores = torch.empty(heads, len(rows), table.shape[1], device=DEVICE)
    score_blocks(index_q, index_k, table, rows, plan, out=scores)
    expected = torch.empty_like(got)
    select_blocks(scores, rows, **forced, out=expected)
    assert torch.equal(got, expected), f"got {got.tolist()}\nexpected {expected.tolist()}"
    assert torch.equal(got.cpu(), brute_selection(scores.cpu(), step.rows, 3, 1, 1))


def test_workspace_holds_the_step_or_as_many_rows_as_the_limit_allows() -> None:
    assert choose_blocks_workspace_bytes(3, 2, 65) == 3 * 2 * 80 * 4
    largest = choose_blocks_workspace_bytes(8192, 4, 8192)
    assert largest == 64 << 20
    assert choose_blocks_workspace_bytes(9, 4, 8192, limit=1) == 4 * 8192 * 4


def forest(requests: int, shared: int, private: int, rows_each: int, seed: int) -> Step:
    """Requests on one shared prefix with private tails of up to `private` blocks, `rows_each` rows each."""
    generator = torch.Generator().manual_seed(seed)
    pages = shared + requests * private
    number = torch.randperm(pages, generator=generator).int()
    table = torch.cat(
        [number[:shared].expand(requests, -1), number[shared:].reshape(requests, private)], 1
    ).contiguous()
    tail = torch.randint(0, private * BLOCK_TOKENS - rows_each, (requests, 1), generator=generator)
    position = (shared * BLOCK_TOKENS + tail + torch.arange(rows_each)).flatten().int()
    request = torch.arange(requests).repeat_interleave(rows_each).int()
    return Step(table, Rows(request, position), pages)


@gpu_only
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(
    "shape", [(6, 300, 9, 1), (64, 200, 4, 1), (301, 61, 3, 1), (5, 70, 9, 5), (3, 90, 20, 1100)], ids=str
)
def test_same_bits_as_decode_verify_extend_alone_and_batched(heads: int, shape: tuple[int, ...]) -> None:
    step = forest(*shape, seed=sum(shape))
    index_q, index_k = inputs(step, heads, 5)
    table, rows = on_device(step)
    forced = {"topk": 16, "init_blocks": 0, "local_blocks": 1}
    size = choose_blocks_workspace_bytes(len(rows), heads, table.shape[1])
    batched = choose(index_q, index_k, table, rows, plan_of(table, rows), size, **forced)
    generator = torch.Generator().manual_seed(1)
    for length in (1, 1, 1, 7, 64, 129):
        part = torch.randperm(len(rows), generator=generator)[:length].to(DEVICE)
        some = Rows(rows.request[part], rows.position[part])
        got = choose(index_q[part], index_k, table, some, plan_of(table, some), size, **forced)
        assert torch.equal(got, batched[:, part]), f"{length} rows differ from the batch"
        if length == 1:
            own = table[some.request.long()]
            some = Rows(torch.zeros_like(some.request), some.position)
            got = choose(index_q[part], index_k, own, some, plan_of(own, some), size, **forced)
            assert torch.equal(got, batched[:, part]), "a row of the only request differs from the batch"


@gpu_only
def test_pages_past_two_to_the_31_elements() -> None:
    step = forest(6, 40, 3, 2, seed=9)
    index_q, index_k = inputs(step, 1, 2)
    table, rows = on_device(step)
    forced = {"topk": 16, "init_blocks": 0, "local_blocks": 1}
    size = choose_blocks_workspace_bytes(len(rows), 1, table.shape[1])
    expected = choose(index_q, index_k, table, rows, plan_of(table, rows), size, **forced)
    offset = (1 << 31) // (BLOCK_TOKENS * DIM) + 17
    pool = torch.empty(offset + step.pages, BLOCK_TOKENS, 1, DIM, dtype=torch.bfloat16, device=DEVICE)
    pool[offset:] = index_k
    moved = table + offset
    got = choose(index_q, pool, moved, rows, plan_of(moved, rows), size, **forced)
    assert torch.equal(got, expected)


@gpu_only
def test_a_thousand_graph_replays_with_changing_steps_equal_eager_runs() -> None:
    requests, width = 33, 150
    index_q = torch.randn(requests, 4, DIM, dtype=torch.bfloat16, device=DEVICE)
    index_k = torch.randn(4000, BLOCK_TOKENS, 1, DIM, dtype=torch.bfloat16, device=DEVICE)
    table = torch.zeros(requests, width, dtype=torch.int32, device=DEVICE)
    request = torch.full((requests,), -1, dtype=torch.int32, device=DEVICE)
    rows = Rows(request, torch.zeros_like(request))
    forced = {"topk": 16, "init_blocks": 0, "local_blocks": 1}
    plan_space = poisoned(plan_prefix_workspace_bytes(requests, requests))
    space = poisoned(choose_blocks_workspace_bytes(requests, 4, width))
    out = torch.empty(4, requests, 16, dtype=torch.int32, device=DEVICE)

    def run() -> None:
        plan = plan_prefix(table, rows, workspace=plan_space)
        choose_blocks(index_q, index_k, table, rows, plan, **forced, workspace=space, out=out)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    generator = torch.Generator().manual_seed(4)
    for replay in range(1000):
        shared = int(torch.randint(0, width - 10, (), generator=generator))
        step = forest(requests, shared, 10, 1, seed=replay)
        table[:, : step.page_table.shape[1]] = step.page_table.to(DEVICE)
        rows.position.copy_(step.rows.position)
        request.copy_(torch.where(torch.rand(requests, generator=generator) < 0.1, -1, step.rows.request))
        graph.replay()
        replayed = out.clone()
        out.fill_(99)
        run()
        assert torch.equal(replayed, out), f"replay {replay} differs from the eager run"


@gpu_only
@pytest.mark.parametrize(("batch", "shared", "private"), [(1, 0, 500), (7, 0, 90), (33, 480, 4)])
def test_an_early_launch_sees_what_the_launch_before_it_wrote(batch: int, shared: int, private: int) -> None:
    """Layers in one graph: a step's plan, and before each choice the layer's queries and every key anew."""
    step = forest(batch, shared, private, 1, seed=batch)
    table, rows = on_device(step)
    forced = {"topk": 16, "init_blocks": 0, "local_blocks": 1}
    plan_space = poisoned(plan_prefix_workspace_bytes(batch, batch))
    space = poisoned(choose_blocks_workspace_bytes(batch, 1, table.shape[1]))
    layers = 3
    queries = torch.randn(layers, batch, 1, DIM, dtype=torch.bfloat16, device=DEVICE)
    keys = torch.randn(layers, step.pages * BLOCK_TOKENS, 1, DIM, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.arange(step.pages * BLOCK_TOKENS, device=DEVICE)
    index_q = torch.zeros(batch, 1, DIM, dtype=torch.bfloat16, device=DEVICE)
    pages = torch.zeros(3, step.pages, BLOCK_TOKENS, 1, DIM, dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty(layers, 1, batch, 16, dtype=torch.int32, device=DEVICE)

    def write(layer: int) -> None:
        index_q.copy_(queries[layer])
        store_tokens(keys[layer], keys[layer], keys[layer], slots, *pages)

    def choose_for(layer: int, plan: PrefixPlan) -> None:
        choose_blocks(index_q, pages[2], table, rows, plan, **forced, workspace=space, out=out[layer])

    plan = plan_prefix(table, rows, workspace=plan_space)
    for layer in range(layers):
        write(layer)
        torch.cuda.synchronize()
        choose_for(layer, plan)
        torch.cuda.synchronize()
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = plan_prefix(table, rows, workspace=plan_space)
        for layer in range(layers):
            write(layer)
            choose_for(layer, plan)
    for replay in range(20):
        out.fill_(99)
        plan_space.fill_(0xA5)
        graph.replay()
        assert torch.equal(out, expected), f"replay {replay} differs"
