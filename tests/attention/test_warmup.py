"""Warming up covers every size class of step and changes nothing in the pool."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from m3_kernels.triton.sm90_choose_blocks import compiled_variant

from sglang_m3.attention import warmup
from sglang_m3.attention.parameters import SelectionParameters
from sglang_m3.attention.pool import LayerPages
from sglang_m3.attention.step import table_sizes
from sglang_m3.attention.workspace import StepShape, Workspaces, bytes_needed

SHAPE = StepShape(
    rows=300,
    requests=9,
    blocks=700,
    pages=3,
    q_heads=4,
    kv_heads=2,
    index_heads=2,
    head_dim=16,
    topk=4,
)


def classes(counts: range | set[int]) -> set[tuple[int, bool]]:
    return {((count - 1).bit_length(), count % 16 == 0) for count in counts}


@pytest.mark.parametrize(
    ("context", "sizes"),
    [
        (128, [128]),
        (65536, [65536]),
        (65664, [65536, 65664]),
        (1 << 20, [65536, 262144, 1 << 20]),
    ],
)
def test_page_tables_have_few_widths_and_reach_the_whole_context(context: int, sizes: list[int]) -> None:
    assert table_sizes(context) == sizes


@pytest.mark.parametrize("rows", [1, 7, 128, 300, 8192])
def test_every_class_of_rows_and_requests_is_visited_with_every_table(rows: int) -> None:
    shape = dataclasses.replace(SHAPE, rows=rows)
    sizes = set(warmup.step_sizes(shape))
    assert {blocks for _, _, blocks in sizes} == {512, 700}
    for blocks in (512, 700):
        assert classes({count for _, count, width in sizes if width == blocks}) == classes(range(1, rows + 1))
        powers = {requests.bit_length() for requests, _, width in sizes if width == blocks}
        assert powers == {requests.bit_length() for requests in range(1, min(9, rows) + 1)}
    for requests, count, blocks in sizes:
        assert requests <= count <= min(rows, blocks * 128), (requests, count, blocks)


@pytest.mark.parametrize(
    ("rows", "requests", "heads", "blocks"),
    [
        (2048, 24, 1, 1024),
        (4096, 48, 1, 512),
        (8192, 48, 4, 512),
        (8192, 48, 1, 8193),
        (8192, 100, 2, 2000),
        (300, 9, 2, 700),
        (96, 17, 1, 3),
    ],
    ids=str,
)
def test_every_variant_of_the_score_kernel_that_a_step_can_need_is_compiled(
    rows: int, requests: int, heads: int, blocks: int
) -> None:
    shape = dataclasses.replace(SHAPE, rows=rows, requests=requests, index_heads=heads, blocks=blocks)
    workspace_bytes = bytes_needed(shape)[1]
    visited = {
        (width, compiled_variant(count, asked, heads, width, workspace_bytes))
        for asked, count, width in warmup.step_sizes(shape)
    }
    # Every number of rows near where something changes, and some between.
    for tokens in table_sizes(blocks * 128):
        width, most = tokens // 128, min(rows, tokens)
        for asked in range(1, requests + 1):
            edges = {edge + d for edge in (0, 8, 64, 128, 256, 1024, 64 * asked) for d in range(-17, 18)}
            some = {*range(asked, most + 1, 37), *(edge // heads for edge in edges), *edges, most}
            for count in sorted(count for count in some if asked <= count <= most):
                wanted = (width, compiled_variant(count, asked, heads, width, workspace_bytes))
                assert wanted in visited, (asked, count, wanted)


def test_a_variant_is_told_apart_where_the_score_kernel_is_launched_otherwise() -> None:
    def variant(count: int, asked: int) -> object:
        return compiled_variant(count, asked, 1, 512, 1 << 26)

    # Another table of spans, other tiles, other loads in flight; then what nothing depends on.
    assert variant(33, 32) != variant(33, 33)
    assert variant(64 * 17, 17) != variant(64 * 17 + 1, 17)
    assert variant(256, 40) != variant(257, 40)
    assert variant(70, 33) == variant(80, 40)


def test_a_warm_up_runs_and_leaves_the_pages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    small = dataclasses.replace(SHAPE, rows=17, requests=2, blocks=3)
    pages = LayerPages(*(torch.randn(3, 128, heads, 16) for heads in (2, 2, 1)))
    before = [page.clone() for page in (pages.k, pages.v, pages.index_k)]
    parameters = SelectionParameters(topk=4, init_blocks=0, local_blocks=1, sparse_layers=(1,))
    warmup.warm_up(small, parameters, pages, Workspaces.allocate(small, "cpu"), torch.float32)
    for name, old, new in zip(("k", "v", "index_k"), before, (pages.k, pages.v, pages.index_k)):
        assert torch.equal(old, new), name
