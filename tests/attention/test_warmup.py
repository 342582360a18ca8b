"""Warming up covers every size class of step and changes nothing in the pool."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sglang_m3.attention import warmup
from sglang_m3.attention.parameters import SelectionParameters
from sglang_m3.attention.pool import LayerPages
from sglang_m3.attention.step import table_sizes
from sglang_m3.attention.workspace import StepShape, Workspaces

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


def test_a_warm_up_runs_and_leaves_the_pages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    small = dataclasses.replace(SHAPE, rows=17, requests=2, blocks=3)
    pages = LayerPages(*(torch.randn(3, 128, heads, 16) for heads in (2, 2, 1)))
    before = [page.clone() for page in (pages.k, pages.v, pages.index_k)]
    parameters = SelectionParameters(topk=4, init_blocks=0, local_blocks=1, sparse_layers=(1,))
    warmup.warm_up(small, parameters, pages, Workspaces.allocate(small, "cpu"), torch.float32)
    for name, old, new in zip(("k", "v", "index_k"), before, (pages.k, pages.v, pages.index_k)):
        assert torch.equal(old, new), name
