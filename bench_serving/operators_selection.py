"""Time block selection on this GPU, SGLang's own operators beside ours where SGLang can be imported.

    python -m bench_serving.operators_selection [--only SUBSTRING] [--out FILE]

First all kernels are compiled, by forked processes on all cores; what fails or takes too long is left out.
Every timing is the median of graph replays that cycle through the caches of several layers, 200 MB or more: a
model's sparse layers each have their own cache and never find their keys in the L2 cache from the last step.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from m3_kernels.rows import BLOCK_TOKENS, Rows
from m3_kernels.triton.sm90_choose_blocks import choose_blocks, choose_blocks_workspace_bytes
from m3_kernels.triton.sm90_plan_prefix import plan_prefix, plan_prefix_workspace_bytes
from torch import Tensor

from bench_serving.forked import run_forked
from bench_serving.graph_time import time_us

DEVICE = torch.device("cuda")
HEAD_DIM, TOPK, SPARSE_LAYERS = 128, 16, 57
CYCLED_BYTES, MOST_LAYERS, FEWEST_LAYERS = 200 << 20, 16, 6
BYTES_PER_US, OPERATIONS_PER_US = 4.3e6, 790e6
"""Ceilings measured on an H200: device copy, and a large bf16 matrix product."""
PEER_CONFIGURATIONS = 8
"""Most configurations that one of SGLang's kernels for extend steps chooses from."""
HEADER = """\
| case | H | batch | new | context | SGLang us | ours us | plan us | floor us | of floor |
|---|---|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Case:
    """One step: `new` query tokens in each of `batch` requests of `context` tokens.

    The last `private` tokens are a request's own, `group_private` tokens before those are shared by groups of
    eight requests, everything before by all. The page table is at least `table_blocks` wide and has rows for
    at least `table_requests`, as in a prefill graph, which is captured before its requests are known.
    """

    name: str
    heads: int
    batch: int
    new: int
    context: int
    private: int
    group_private: int = 0
    table_blocks: int = 0
    table_requests: int = 0

    @property
    def label(self) -> str:
        return f"{self.name}, {self.heads} heads, {self.batch} x {self.new} rows of {self.context:,}"

    @property
    def has_peer(self) -> bool:
        """SGLang's operators take the step's own table alone."""
        return self.table_requests == 0

    @property
    def phase_is_decode(self) -> bool:
        return self.new == 1

    @property
    def blocks(self) -> int:
        return -(-self.context // BLOCK_TOKENS)

    @property
    def table_width(self) -> int:
        return max(self.blocks, self.table_blocks)

    def page_table(self) -> tuple[Tensor, int]:
        """`[R, B]` int32 page ids in random physical order, and how many pages there are."""
        own, grouped = -(-self.private // BLOCK_TOKENS), self.group_private // BLOCK_TOKENS
        common = self.blocks - own - grouped
        request = torch.arange(self.batch)[:, None]
        groups = -(-self.batch // 8)
        parts = [
            torch.arange(common).expand(self.batch, -1),
            common + request // 8 * grouped + torch.arange(grouped),
            common + groups * grouped + request * own + torch.arange(own),
        ]
        pages = common + groups * grouped + self.batch * own
        requests = max(self.batch, self.table_requests)
        table = torch.zeros(requests, self.table_width, dtype=torch.int32, device=DEVICE)
        table[: self.batch, : self.blocks] = torch.randperm(pages)[torch.cat(parts, 1)].to(DEVICE)
        return table, pages

    def rows(self) -> Rows:
        """The last `new` tokens of every request."""
        request = torch.arange(self.batch, device=DEVICE).repeat_interleave(self.new)
        position = torch.arange(self.context - self.new, self.context, device=DEVICE).repeat(self.batch)
        return Rows(request.int(), position.int())

    def floor_us(self, pages: int) -> float:
        """Each page read once, or each visible product done once, whichever takes longer."""
        visible = self.batch * sum(range(self.context - self.new + 1, self.context + 1))
        operations = 2 * HEAD_DIM * self.heads * visible
        return max(pages * BLOCK_TOKENS * HEAD_DIM * 2 / BYTES_PER_US, operations / OPERATIONS_PER_US)


def cases() -> Iterator[Case]:
    for heads in (1, 4):
        for private in (512, 65536):
            for batch in (1, 8, 32, 64, 256):
                if batch * private <= 64 * 65536:
                    kind = "all" if private == 65536 else f"{private}"
                    yield Case(f"decode, {kind} private", heads, batch, 1, 65536, private)
    yield Case("decode, 512 private, table for 1M", 1, 64, 1, 65536, 512, table_blocks=8192)
    for context in (2048, 4096, 16384, 131072):
        yield Case("decode, 512 private", 1, 64, 1, context, 512)
    yield Case("decode, two-level tree, 512 private", 1, 64, 1, 65536, 512, 24576)
    yield Case("decode, two-level tree, 512 private", 1, 256, 1, 65536, 512, 24576)
    yield Case("verify, 4 draft tokens, 512 private", 1, 32, 4, 65536, 512)
    for heads in (1, 4):
        for new in (32, 512, 2048, 8192):
            yield Case("extend, 65,536 cached", heads, 1, new, 65536 + new, new)
    yield Case("extend, 60,928 cached and shared", 1, 8, 512, 60928 + 512, 512)
    yield Case("extend, 1M", 1, 1, 512, 1_000_000, 512)
    yield Case("extend, 1M", 4, 1, 2048, 1_000_000, 2048)
    yield Case("decode, 1M", 1, 1, 1, 1_000_000, 512)
    for heads in (1, 4):
        for new in (256, 512, 1024, 2048, 8192):
            for requests, blocks in ((1, 0), (32, 1024), (64, 8192)):
                name = f"extend in a graph for {requests} requests, 60,928 cached"
                yield Case(name, heads, 1, new, 60928 + new, new, 0, blocks, requests)


def layer_caches(pages: int, count: int | None = None) -> list[Tensor]:
    """Index pages of so many layers, by default of as many as are to be cycled through."""
    if count is None:
        size = pages * BLOCK_TOKENS * HEAD_DIM * 2
        count = min(MOST_LAYERS, max(FEWEST_LAYERS, CYCLED_BYTES // size))
    shape = (pages, BLOCK_TOKENS, 1, HEAD_DIM)
    return [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(count)]


def peer(case: Case, table: Tensor, index_q: Tensor) -> Callable[[Tensor], object]:
    """SGLang 0.5.23's scores and top-k for the same step."""
    from sglang.kernels.ops.attention.minimax_sparse.decode.flash_with_topk_idx import (
        flash_decode_with_topk_idx,
    )
    from sglang.kernels.ops.attention.minimax_sparse.prefill.flash_with_topk_idx import (
        flash_prefill_with_topk_index,
    )

    tokens = torch.arange(BLOCK_TOKENS, device=DEVICE)
    slots = (table[: case.batch, : case.blocks, None] * BLOCK_TOKENS + tokens).flatten(1).int()
    ids = torch.arange(case.batch, device=DEVICE)
    lengths = torch.full((case.batch,), case.context, device=DEVICE, dtype=torch.int32)
    common = {"disable_index_value": True, "page_size": BLOCK_TOKENS}
    if case.new == 1:
        return lambda pages: flash_decode_with_topk_idx(
            index_q,
            None,
            pages.view(-1, 1, HEAD_DIM),
            None,
            slots,
            lengths,
            case.context,
            ids,
            BLOCK_TOKENS,
            TOPK,
            0,
            1,
            **common,
        )
    starts = torch.arange(case.batch + 1, device=DEVICE, dtype=torch.int32) * case.new
    return lambda pages: flash_prefill_with_topk_index(
        index_q,
        pages.view(-1, 1, HEAD_DIM),
        None,
        None,
        slots,
        ids,
        starts,
        lengths,
        lengths - case.new,
        case.new,
        case.context,
        1,
        BLOCK_TOKENS,
        TOPK,
        0,
        1,
        cu_seqblocks_q=starts,
        max_seqblock_q=case.new,
        all_seqblock_q=case.batch * case.new,
        **common,
    )


@dataclass(frozen=True)
class Prepared:
    """A case on the device: `choose` takes a layer's index pages, `plan` none."""

    layers: list[Tensor]
    pages: int
    table: Tensor
    index_q: Tensor
    choose: Callable[[Tensor], Tensor]
    plan: Callable[[], object]

    def choose_once(self) -> Tensor:
        """`choose` for the first layer."""
        return self.choose(self.layers[0])


def prepared(case: Case, layers: int | None = None) -> Prepared:
    """Random index queries and keys of so many layers (see `layer_caches`), and workspaces."""
    table, pages = case.page_table()
    rows = case.rows()
    index_q = torch.randn(len(rows), case.heads, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    plan_space, space = (
        torch.empty(size, dtype=torch.uint8, device=DEVICE)
        for size in (
            plan_prefix_workspace_bytes(len(rows), len(table)),
            choose_blocks_workspace_bytes(len(rows), case.heads, case.table_width),
        )
    )
    out = torch.empty(case.heads, len(rows), TOPK, dtype=torch.int32, device=DEVICE)
    plan = plan_prefix(table, rows, workspace=plan_space)

    def choose(layer: Tensor) -> Tensor:
        return choose_blocks(
            index_q,
            layer,
            table,
            rows,
            plan,
            topk=TOPK,
            init_blocks=0,
            local_blocks=1,
            workspace=space,
            out=out,
        )

    return Prepared(
        layer_caches(pages, layers),
        pages,
        table,
        index_q,
        choose,
        lambda: plan_prefix(table, rows, workspace=plan_space),
    )


def measure(case: Case, with_peer: bool) -> str:
    """One line of the table."""
    ready = prepared(case)
    plan_us = time_us(lambda _: ready.plan(), ready.layers)
    choose_us = time_us(ready.choose, ready.layers)
    theirs = "not measured"
    if with_peer:
        theirs = f"{time_us(peer(case, ready.table, ready.index_q), ready.layers):.1f}"
    total, floor = choose_us + plan_us / SPARSE_LAYERS, case.floor_us(ready.pages)
    step = f"{case.name} | {case.heads} | {case.batch} | {case.new} | {case.context:,}"
    return f"| {step} | {theirs} | {total:.1f} | {plan_us:.1f} | {floor:.1f} | {floor / total:.0%} |"


@dataclass(frozen=True)
class CompileJob:
    """What compiles kernels by running a step once on a single layer.

    Attributes:
        name: whose kernels, and the case.
        needed_by: the cases that are not measured, or not beside SGLang, without these kernels.
        theirs: they are SGLang's.
    """

    name: str
    run: Callable[[], object]
    needed_by: tuple[Case, ...]
    theirs: bool


def compile_jobs(measured: list[Case], with_peer: bool) -> list[CompileJob]:
    """Jobs that between them compile every kernel of the cases, those that take long first.

    SGLang's decode steps share a kernel that is built by nvcc under a lock: one of them comes first and the
    others last, so that they do not wait for it. Its extend steps try several configurations of two kernels,
    of which one compiles for half a minute: each configuration is a job of its own.
    """
    ours = [
        CompileJob(f"ours: {case.label}", functools.partial(compile_ours, case), (case,), False)
        for case in measured
    ]
    theirs = [case for case in measured if with_peer and case.has_peer]
    decode = [
        CompileJob(f"SGLang's: {case.label}", functools.partial(compile_theirs, case), (case,), True)
        for case in theirs
        if case.new == 1
    ]
    # Triton compiles anew where an argument is 1, or no multiple of 16.
    alike: dict[tuple[int, bool, bool], list[Case]] = {}
    for case in theirs:
        if case.new > 1:
            alike.setdefault((case.heads, case.batch == 1, case.blocks % 16 == 0), []).append(case)
    extend = [
        CompileJob(
            f"SGLang's configuration {number}: {same[0].label}",
            functools.partial(compile_theirs, same[0], number),
            tuple(same),
            True,
        )
        for number in range(PEER_CONFIGURATIONS)
        for same in alike.values()
    ]
    return [*decode[:1], *extend, *ours, *decode[1:]]


def compile_ours(case: Case) -> None:
    prepared(case, layers=1).choose_once()
    torch.cuda.synchronize()


def compile_theirs(case: Case, configuration: int = 0) -> None:
    """Run SGLang's step once, an extend step with one of the configurations that its kernels choose from."""
    if case.new > 1:
        from sglang.kernels.ops.attention.minimax_sparse.prefill import flash_with_topk_idx as extend

        for kernel in (extend._index_block_score_only_kernel, extend._topk_index_kernel):
            while not hasattr(kernel, "configs"):
                kernel = kernel.fn
            all_of_them = vars(kernel).setdefault("all_configs", kernel.configs)
            kernel.configs = [all_of_them[configuration % len(all_of_them)]]
    table, pages = case.page_table()
    index_q = torch.empty(case.batch * case.new, case.heads, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    peer(case, table, index_q)(layer_caches(pages, 1)[0])
    torch.cuda.synchronize()


def main() -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--out", type=Path, help="write each line to this file as well, as it comes")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that compile kernels")
    parser.add_argument("--compile-seconds", type=float, default=70, help="the limit for that")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many")
    chosen = parser.parse_args()
    with open(os.devnull, "w") if chosen.out is None else chosen.out.open("w") as file:

        def say(line: str) -> None:
            print(line, flush=True)
            print(line, file=file, flush=True)

        measured = [case for case in cases() if chosen.only in case.name]
        jobs = compile_jobs(measured, importlib.util.find_spec("sglang") is not None)
        outcomes = run_forked([job.run for job in jobs], chosen.processes, chosen.compile_seconds)
        timed = {
            side: {case for job in jobs if job.theirs == side for case in job.needed_by}
            for side in (False, True)
        }
        for job, why_not in zip(jobs, outcomes, strict=True):
            if why_not:
                say(f"left out, {job.name}: {why_not}")
                timed[job.theirs] -= set(job.needed_by)
        say(f"compiled in {time.monotonic() - begin:.0f} s")
        say(HEADER)
        torch.manual_seed(0)
        for case in measured:
            if time.monotonic() - begin > chosen.seconds:
                say(f"out of time before {case.label}")
                break
            if case in timed[False]:
                say(measure(case, case in timed[True]))


if __name__ == "__main__":
    main()
