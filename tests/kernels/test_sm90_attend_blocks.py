"""The sm90 attention against brute force: every way of cutting a step, odd sizes, NaN where nobody looks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from m3_kernels.rows import BLOCK_TOKENS, Rows
from torch import Tensor

from tests.kernels.cases import UNREAD, Step, brute_attention, brute_selection, steps
from tests.kernels.sm90 import DEVICE, REAL, on_device, poisoned

import m3_kernels.triton.sm90_attend_blocks as sm90  # isort: skip

HEADS = [(8, 1), (32, 2), (64, 4), (16, 1), (4, 2), (6, 2), (2, 1), (64, 1)]
LONGEST_UNIONS = {"by_page": 0, "union": 1 << 30, "mixed": 5}
TOLERANCE = 2e-2 if REAL else 1e-2


def attend(q: Tensor, k: Tensor, v: Tensor, step: Step, chosen: Tensor | None, scale: float) -> Tensor:
    """The operator in a poisoned workspace of exactly the promised size, into a poisoned output."""
    topk = None if chosen is None else chosen.shape[-1]
    size = sm90.attend_blocks_workspace_bytes(
        q.shape[0], q.shape[1], k.shape[2], q.shape[2], topk=topk, pages=k.shape[0]
    )
    out = torch.full(q.shape, float("nan"), dtype=torch.bfloat16, device=DEVICE)
    table, rows = on_device(step)
    sm90.attend_blocks(
        q.to(DEVICE),
        k.to(DEVICE),
        v.to(DEVICE),
        table,
        rows,
        None if chosen is None else chosen.to(DEVICE),
        scale=scale,
        workspace=poisoned(size),
        out=out,
    )
    return out.cpu()


def inputs(
    step: Step, heads: tuple[int, int], dim: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and pages whose tokens that no row of the page's requests sees are NaN."""
    q_heads, kv_heads = heads
    q = torch.randn(len(step.rows), q_heads, dim, generator=generator).bfloat16()
    last_seen = torch.full((step.pages,), -1)
    for request, position in zip(step.rows.request.tolist(), step.rows.position.tolist()):
        for block in range(position // BLOCK_TOKENS + 1) if request >= 0 else ():
            page = int(step.page_table[request, block])
            last_seen[page] = max(int(last_seen[page]), position - block * BLOCK_TOKENS)
    unseen = torch.arange(BLOCK_TOKENS) > last_seen[:, None]
    pools = []
    for _ in range(2):
        pool = torch.randn(step.pages, BLOCK_TOKENS, kv_heads, dim, generator=generator)
        pools.append(pool.masked_fill(unseen[:, :, None, None], float("nan")).to(dtype))
    return q, pools[0], pools[1]


def check(got: Tensor, expected: Tensor) -> None:
    error = (got.double() - expected).abs().flatten(1).amax(1)
    worst = int(error.nan_to_num(nan=1e9).argmax())
    assert not got.isnan().any(), f"NaN in rows {got.isnan().flatten(1).any(1).nonzero().flatten().tolist()}"
    torch.testing.assert_close(
        got.double(), expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"worst row {worst}: {text}"
    )


def force(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    """Replace fields of every tiling, so that small steps reach what large ones use."""
    chosen_tiling = sm90.tiling
    monkeypatch.setattr(sm90, "tiling", lambda *shape: dataclasses.replace(chosen_tiling(*shape), **changes))


# Shrinking would take minutes in the interpreter.
@settings(max_examples=30 if REAL else 5, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    steps(max_rows=9 if REAL else 5),
    st.integers(0, 2**31),
    st.sampled_from(HEADS),
    st.booleans(),
    st.booleans(),
)
def test_small_steps_equal_brute_force(
    step: Step, seed: int, heads: tuple[int, int], dense: bool, e4m3: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float8_e4m3fn if e4m3 else torch.bfloat16
    dim = (32, 64, 128)[seed % 3]
    q, k, v = inputs(step, heads, dim, dtype, generator)
    chosen = None
    if not dense:
        scores = torch.randn(heads[1], len(step.rows), step.page_table.shape[1], generator=generator)
        chosen = brute_selection(scores, step.rows, 5, 0, 1)
    got = attend(q, k, v, step, chosen, 0.11)
    check(got, brute_attention(q, k.float(), v.float(), step, chosen, 0.11))


def extend_step(row_count: int, generator: torch.Generator) -> Step:
    """Chunks of three requests on a common prefix of two pages, one of them from its very first token, with
    padded rows between and after them."""
    lengths = [0, 1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 5 * BLOCK_TOKENS - 3]
    request, position = [], []
    per_request = row_count // 3 - 1
    for number, begin in enumerate((0, lengths[5], lengths[2])):
        request += [number] * per_request + [-1]
        position += [*range(begin, begin + per_request), UNREAD]
    request += [-1] * (row_count - len(request))
    position += [UNREAD] * (row_count - len(position))
    blocks = max(p for p in position if p != UNREAD) // BLOCK_TOKENS + 1
    table = torch.full((3, blocks + 1), UNREAD, dtype=torch.int32)
    order = torch.randperm(2 + 3 * blocks, generator=generator).int()
    for number in range(3):
        last = max(p for r, p in zip(request, position) if r == number) // BLOCK_TOKENS
        own = order[2 + number * blocks :][: last + 1].clone()
        own[: min(2, last)] = order[: min(2, last)]
        table[number, : last + 1] = own
    rows = Rows(torch.tensor(request, dtype=torch.int32), torch.tensor(position, dtype=torch.int32))
    return Step(table, rows, 2 + 3 * blocks)


@pytest.mark.parametrize("longest", LONGEST_UNIONS)
@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "row_count"),
    [
        ((32, 2), 128, torch.bfloat16, 26),
        ((8, 1), 128, torch.float8_e4m3fn, 52),
        ((6, 2), 64, torch.bfloat16, 40),
        ((2, 2), 32, torch.float8_e4m3fn, 35),
        ((4, 2), 16, torch.bfloat16, 29),
    ],
    ids=str,
)
def test_extend_chunks_equal_brute_force_however_they_are_routed(
    longest: str,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    row_count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(5)
    step = extend_step(row_count, generator)
    q, k, v = inputs(step, heads, dim if REAL else min(dim, 32), dtype, generator)
    scores = torch.randn(heads[1], row_count, step.page_table.shape[1], generator=generator)
    scores[..., 0] = 9  # one block that everybody chooses
    chosen = brute_selection(scores, step.rows, 4, 0, 1)
    monkeypatch.setattr(sm90, "UNION_FROM_ROWS", 1)
    # So few programs that each has several pages and tiles.
    monkeypatch.setattr(sm90, "multiprocessors", lambda device: 1)
    pass_rows = 3 * sm90.tiling(row_count, *heads, q.shape[-1], 4).tile_rows
    force(monkeypatch, splits=1, pass_rows=pass_rows, longest_union=LONGEST_UNIONS[longest])
    got = attend(q, k, v, step, chosen, 0.2)
    check(got, brute_attention(q, k.float(), v.float(), step, chosen, 0.2))


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "splits", "warps"),
    [
        ((8, 1), 128, torch.bfloat16, 8, 4),
        ((32, 2), 128, torch.float8_e4m3fn, 3, 4),
        ((6, 2), 64, torch.float8_e4m3fn, 1, 2),
        ((16, 1), 32, torch.bfloat16, 2, 4),
        ((4, 2), 16, torch.bfloat16, 4, 8),
    ],
    ids=str,
)
def test_decode_rows_equal_brute_force_however_they_are_cut(
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    splits: int,
    warps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(10)
    row_count = 25 if REAL else 13
    step = extend_step(row_count, generator)
    q, k, v = inputs(step, heads, dim if REAL else min(dim, 32), dtype, generator)
    q[step.rows.request < 0] = float("nan")
    scores = torch.randn(heads[1], row_count, step.page_table.shape[1], generator=generator)
    chosen = brute_selection(scores, step.rows, 5, 1, 1)
    force(monkeypatch, splits=splits, tokens=16 * warps, warps=warps)
    got = attend(q, k, v, step, chosen, 0.2)
    check(got, brute_attention(q.nan_to_num(), k.float(), v.float(), step, chosen, 0.2))


@pytest.mark.parametrize("room", [True, False], ids=["all_pages_fit", "few_pages_fit"])
@pytest.mark.parametrize("heads", [(8, 1), (6, 2)], ids=str)
def test_e4m3_pages_widened_for_a_chunk_are_the_same_numbers(
    heads: tuple[int, int], room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(9)
    row_count = 43
    step = extend_step(row_count, generator)
    q, k, v = inputs(step, heads, 128 if REAL else 32, torch.float8_e4m3fn, generator)
    scores = torch.randn(heads[1], row_count, step.page_table.shape[1], generator=generator)
    chosen = brute_selection(scores, step.rows, 4, 0, 1)
    monkeypatch.setattr(sm90, "UNION_FROM_ROWS", 1)
    monkeypatch.setattr(sm90, "WIDEN_FROM_ROWS", 1)
    monkeypatch.setattr(sm90, "LAYOUT_CHUNK", 8)
    tile_rows = sm90.tiling(row_count, *heads, q.shape[-1], 4).tile_rows
    force(monkeypatch, splits=1, pass_rows=(24 if room else 2) * tile_rows, longest_union=1 << 30)
    got = attend(q, k, v, step, chosen, 0.2)
    check(got, brute_attention(q, k.float(), v.float(), step, chosen, 0.2))
    if not room:
        force(monkeypatch, longest_union=0)
    same = attend(q, k.bfloat16(), v.bfloat16(), step, chosen, 0.2)
    assert torch.equal(got, same), f"rows {(got != same).flatten(1).any(1).nonzero().flatten().tolist()}"


def test_e4m3_rows_of_a_pass_that_is_all_padding_give_zeros_when_few_pages_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(10)
    monkeypatch.setattr(sm90, "UNION_FROM_ROWS", 1)
    monkeypatch.setattr(sm90, "WIDEN_FROM_ROWS", 1)
    monkeypatch.setattr(sm90, "LAYOUT_CHUNK", 8)
    heads, dim = (8, 1), 128 if REAL else 32
    tile_rows = sm90.tiling(24, *heads, dim, 4).tile_rows
    step = extend_step(24, generator)
    padding = torch.full((3 * tile_rows,), -1, dtype=torch.int32)
    request = torch.cat([step.rows.request, padding])
    position = torch.cat([step.rows.position, torch.full_like(padding, UNREAD)])
    step = dataclasses.replace(step, rows=Rows(request, position))
    q, k, v = inputs(step, heads, dim, torch.float8_e4m3fn, generator)
    scores = torch.randn(1, len(request), step.page_table.shape[1], generator=generator)
    chosen = brute_selection(scores, step.rows, 4, 0, 1)
    force(monkeypatch, splits=1, pass_rows=tile_rows, longest_union=1 << 30)
    got = attend(q, k, v, step, chosen, 0.2)
    check(got, brute_attention(q, k.float(), v.float(), step, chosen, 0.2))


@pytest.mark.parametrize(
    ("walk", "splits"),
    # 8 and 32: more programs than a row has chosen blocks; 32: merged in chunks.
    [
        (walk, splits)
        for walk in ("row", "union", "dense")
        for splits in (1, 2, 32 if walk == "dense" or (walk == "row" and REAL) else 8)
    ],
)
def test_splits_change_nothing_but_rounding(splits: int, walk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(6)
    rows = 25 if REAL else 13
    step = extend_step(rows, generator)
    q, k, v = inputs(step, (8, 2), 128 if REAL else 32, torch.bfloat16, generator)
    scores = torch.randn(2, rows, step.page_table.shape[1], generator=generator)
    chosen = None if walk == "dense" else brute_selection(scores, step.rows, 6, 1, 1)
    monkeypatch.setattr(sm90, "UNION_FROM_ROWS", 1 if walk == "union" else 1 << 30)
    force(monkeypatch, splits=splits)
    got = attend(q, k, v, step, chosen, 0.2)
    check(got, brute_attention(q, k.float(), v.float(), step, chosen, 0.2))


@pytest.mark.parametrize("walk", ["row", *LONGEST_UNIONS])
def test_chosen_blocks_may_come_in_any_order_with_gaps_or_not_at_all(
    walk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(7)
    table = torch.randperm(9, generator=generator).int()[None]
    rows = Rows(torch.zeros(4, dtype=torch.int32), torch.tensor([1151, 600, 127, 900], dtype=torch.int32))
    step = Step(table, rows, 9)
    q, k, v = inputs(step, (8, 1), 32, torch.bfloat16, generator)
    lists = [[8, -1, 0, 5], [4, 1, -1, 0], [-1, -1, 0, -1], [-1, -1, -1, -1]]
    chosen = torch.tensor([lists], dtype=torch.int32)
    if walk in LONGEST_UNIONS:
        monkeypatch.setattr(sm90, "UNION_FROM_ROWS", 1)
        monkeypatch.setattr(sm90, "LAYOUT_CHUNK", 8)
        tile_rows = sm90.tiling(4, 8, 1, 32, 4).tile_rows
        force(monkeypatch, splits=1, pass_rows=tile_rows, longest_union=LONGEST_UNIONS[walk])
    check(attend(q, k, v, step, chosen, 0.3), brute_attention(q, k.float(), v.float(), step, chosen, 0.3))


@pytest.mark.skipif(not REAL, reason="bits and graphs are the GPU's")
@pytest.mark.parametrize(
    ("row_count", "longest"), [*((1100, longest) for longest in LONGEST_UNIONS), (9, None)], ids=str
)
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_a_captured_graph_repeats_the_same_bits(
    row_count: int, longest: str | None, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(8)
    step = extend_step(row_count, generator)
    q, k, v = (x.to(DEVICE) for x in inputs(step, (64, 4), 128, torch.bfloat16, generator))
    scores = torch.randn(4, row_count, step.page_table.shape[1], generator=generator)
    topk = None if dense else 6
    chosen = None if topk is None else brute_selection(scores, step.rows, topk, 1, 1).to(DEVICE)
    if longest is not None and not dense:
        force(monkeypatch, longest_union=LONGEST_UNIONS[longest])
    table, rows = on_device(step)
    size = sm90.attend_blocks_workspace_bytes(row_count, 64, 4, 128, topk=topk, pages=step.pages)
    workspace, out = poisoned(size), torch.empty_like(q)

    def run() -> None:
        sm90.attend_blocks(q, k, v, table, rows, chosen, scale=0.1, workspace=workspace, out=out)

    run()
    torch.cuda.synchronize()
    eager = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Twice, so that its first launch follows its last.
        run()
        run()
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, eager), f"{(out != eager).flatten(1).any(1).nonzero().flatten()[:9].tolist()}"
