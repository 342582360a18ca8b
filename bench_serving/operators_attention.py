"""Time `attend_blocks` on one sm90 GPU, beside SGLang's own operators where SGLang can be imported.

`python -m bench_serving.operators_attention` prints a table and, with a path as argument, writes it there as
JSON. Every timing replays a CUDA graph that calls the public function on the caches of several layers in
turn, because a model's layers never find their keys in the L2 cache from the step before.

The floor of a case is the larger of its arithmetic at `MATRIX_RATE` and its unique bytes at `COPY_RATE`.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy
import torch
from m3_kernels.rows import BLOCK_TOKENS, Rows
from m3_kernels.triton.sm90_attend_blocks import attend_blocks, attend_blocks_workspace_bytes
from torch import Tensor

from bench_serving.graph_time import time_us

CONTEXT_TOKENS = 65_536
TOPK = 16
HEAD_DIM = 128
CYCLED_BYTES = 200 << 20
"""What the layers of a graph read together, where `MOST_LAYERS` and `POOL_BYTES` allow it: four L2 caches."""
MOST_LAYERS = 64
POOL_BYTES = 16 << 30
GRAPH_CALLS = 24
"""Calls in the graph of a short step: starting a graph takes microseconds, which a model pays once."""
SHORT_US = 100
MATRIX_RATE = 790e12
"""Floating-point operations per second of an 8192-cubed bfloat16 product on this GPU."""
COPY_RATE = 4.3e12
"""Bytes per second, read plus written, of a device copy on this GPU."""
CHANGE_PROBABILITY = 1 / 16
DEVICE = "cuda"


def random_selection(heads: int, rows: int, blocks: int) -> Tensor:
    """Every row chooses uniformly: the worst case for sharing blocks between rows."""
    chosen = torch.rand(heads, rows, blocks, device=DEVICE).topk(TOPK, -1).indices
    return chosen.int().sort(-1).values.contiguous()


def realistic_selection(heads: int, rows: int, blocks: int) -> Tensor:
    """The first and the last block, and 14 others, each of which changes from row to row one time in 16."""
    generator = numpy.random.default_rng(0)
    chosen = numpy.empty((heads, rows, TOPK), dtype=numpy.int32)
    chosen[..., 0], chosen[..., -1] = 0, blocks - 1
    for head in range(heads):
        members = generator.choice(blocks - 2, TOPK - 2, replace=False) + 1
        changes = generator.random((rows, TOPK - 2)) < CHANGE_PROBABILITY
        for row in range(rows):
            for place in changes[row].nonzero()[0]:
                others = set(members.tolist())
                while (candidate := int(generator.integers(1, blocks - 1))) in others:
                    pass
                members[place] = candidate
            chosen[head, row, 1:-1] = numpy.sort(members)
    return torch.from_numpy(chosen).to(DEVICE)


def identical_selection(heads: int, rows: int, blocks: int) -> Tensor:
    """All rows choose the same blocks: the best case."""
    return random_selection(heads, 1, blocks).expand(heads, rows, TOPK).contiguous()


SELECTIONS = {"random": random_selection, "realistic": realistic_selection, "identical": identical_selection}


@dataclass(frozen=True)
class Case:
    """One row of the table; `shared` says whether the requests of a decode step hold the same pages."""

    phase: str
    q_heads: int
    kv_heads: int
    rows: int
    selection: str | None
    shared: bool = False
    e4m3: bool = False
    context: int = CONTEXT_TOKENS


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    layers: list[tuple[Tensor, Tensor]]
    page_table: Tensor
    rows: Rows
    chosen: Tensor | None


EXTEND = [
    Case("extend", q_heads, kv_heads, rows, selection)
    for q_heads, kv_heads in ((64, 4), (8, 1))
    for rows in (32, 512, 2048, 8192)
    for selection in SELECTIONS
]
DECODE = [
    Case("decode", q_heads, kv_heads, rows, "random")
    for q_heads, kv_heads in ((64, 4), (8, 1))
    for rows in (1, 8, 16, 32, 64)
]
GROUPED = [
    Case("decode", 64, 4, 64, "realistic", shared=True),
    Case("decode", 8, 1, 64, "realistic", shared=True),
]
DENSE = [
    Case("decode", q_heads, kv_heads, rows, None, shared=shared)
    for q_heads, kv_heads in ((8, 1), (64, 4))
    for rows, shared in ((1, False), (8, False), (8, True), (64, False), (64, True))
    if (kv_heads, rows, shared) != (4, 64, False)  # pages for it alone would not fit
] + [
    Case("extend", q_heads, kv_heads, rows, None, context=60_928)
    for q_heads, kv_heads in ((8, 1), (64, 4))
    for rows in (64, 500, 2048, 8192)
]
E4M3 = [
    Case("extend", 64, 4, 8192, "realistic", e4m3=True),
    Case("extend", 8, 1, 8192, "realistic", e4m3=True),
    Case("decode", 8, 1, 64, "random", e4m3=True),
]
CASES = EXTEND + DECODE + GROUPED + DENSE + E4M3


def touched_pages(page_table: Tensor, rows: Rows, chosen: Tensor | None, kv_heads: int) -> int:
    """Distinct (page, kv head) pairs that a step attends to."""
    if chosen is None:
        return page_table.unique().numel() * kv_heads
    page = page_table[rows.request.long()[None, :, None], chosen.long()]
    return sum(page[head].unique().numel() for head in range(kv_heads))


def make_inputs(case: Case, most_layers: int = MOST_LAYERS) -> Inputs:
    """Random queries and caches; pages lie in random physical order."""
    extend = case.phase == "extend"
    blocks = case.context // BLOCK_TOKENS
    table_blocks = blocks + (-(-case.rows // BLOCK_TOKENS) if extend else 0)
    requests = 1 if extend else case.rows
    pages = table_blocks * (1 if case.shared else requests)
    page_table = torch.randperm(pages, device=DEVICE).int().view(-1, table_blocks).expand(requests, -1)
    row = torch.arange(case.rows, device=DEVICE, dtype=torch.int32)
    rows = (
        Rows(torch.zeros_like(row), case.context + row)
        if extend
        else Rows(row, torch.full_like(row, case.context - 1))
    )
    dtype = torch.float8_e4m3fn if case.e4m3 else torch.bfloat16
    shape = (pages, BLOCK_TOKENS, case.kv_heads, HEAD_DIM)
    page_bytes = 2 * dtype.itemsize * BLOCK_TOKENS * HEAD_DIM
    chosen = None
    if case.selection is not None:
        chosen = SELECTIONS[case.selection](case.kv_heads, case.rows, blocks)
    touched = touched_pages(page_table, rows, chosen, case.kv_heads) * page_bytes
    layer_bytes = pages * case.kv_heads * page_bytes
    layer_count = max(2, min(MOST_LAYERS, -(-CYCLED_BYTES // touched), POOL_BYTES // layer_bytes))
    layer_count = min(layer_count, 1 if layer_bytes > 4 << 30 else most_layers)

    def pool() -> Tensor:
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).to(dtype)

    q = torch.randn(case.rows, case.q_heads, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    layers = [(pool(), pool()) for _ in range(layer_count)]
    return Inputs(q, layers, page_table.contiguous(), rows, chosen)


def floor_us(case: Case, inputs: Inputs) -> float:
    """The least time of the case on this GPU, in microseconds."""
    per_row = TOPK if inputs.chosen is not None else case.context // BLOCK_TOKENS
    flops = 4 * case.rows * case.q_heads * per_row * BLOCK_TOKENS * HEAD_DIM
    loaded = touched_pages(inputs.page_table, inputs.rows, inputs.chosen, case.kv_heads)
    page_bytes = 2 * BLOCK_TOKENS * HEAD_DIM * inputs.layers[0][0].element_size()
    moved = loaded * page_bytes + 2 * inputs.q.numel() * inputs.q.element_size()
    return max(flops / MATRIX_RATE, moved / COPY_RATE) * 1e6


def cycle(case: Case, inputs: Inputs) -> list[tuple[Tensor, Tensor]]:
    """The layers as the timed graph calls them: in turn, a short step's several times."""
    turns = -(-GRAPH_CALLS // len(inputs.layers)) if floor_us(case, inputs) < SHORT_US else 1
    return inputs.layers * turns


def ours(inputs: Inputs) -> tuple[Callable[[tuple[Tensor, Tensor]], Tensor], Tensor]:
    """The public function over a layer, and the output it writes."""
    k = inputs.layers[0][0]
    size = attend_blocks_workspace_bytes(
        *inputs.q.shape[:2],
        k.shape[2],
        HEAD_DIM,
        topk=None if inputs.chosen is None else TOPK,
        pages=k.shape[0],
    )
    workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    out = torch.empty_like(inputs.q)

    def run(layer: tuple[Tensor, Tensor]) -> Tensor:
        return attend_blocks(
            inputs.q,
            *layer,
            inputs.page_table,
            inputs.rows,
            inputs.chosen,
            scale=HEAD_DIM**-0.5,
            workspace=workspace,
            out=out,
        )

    return run, out


COMPILED_CONTEXT_TOKENS = 16_384
"""Kernels are the same for longer contexts."""


def compile_kernels(case: Case) -> None:
    """Run ours and SGLang's once on a shorter context, so that the caches on disk have their kernels."""
    short = replace(case, context=min(case.context, COMPILED_CONTEXT_TOKENS))
    inputs = make_inputs(short, most_layers=1)
    for run in (ours(inputs)[0], sglang_operator(short, inputs)):
        if run is not None:
            run(inputs.layers[0])
    torch.cuda.synchronize()


def prepared_once(case: Case) -> Callable[[], Tensor]:
    """One call of the case, on its first layer."""
    inputs = make_inputs(case)
    run, _ = ours(inputs)
    return lambda: run(inputs.layers[0])


def relative_error(inputs: Inputs, layer: tuple[Tensor, Tensor], out: Tensor, rows: int = 64) -> float:
    """||out - exact|| / ||exact|| over some rows, `exact` in float64."""
    sample = torch.randperm(len(inputs.rows), device=DEVICE)[:rows].tolist()
    group = inputs.q.shape[1] // layer[0].shape[2]
    square_error = square = 0.0
    for row in sample:
        request, position = int(inputs.rows.request[row]), int(inputs.rows.position[row])
        for head in range(layer[0].shape[2]):
            if inputs.chosen is None:
                block = torch.arange(position // BLOCK_TOKENS + 1, device=DEVICE)
            else:
                block = inputs.chosen[head, row].long()
            page = inputs.page_table[request, block].long()
            keys, values = (pool[page, :, head].float().double().flatten(0, 1) for pool in layer)
            heads = slice(head * group, (head + 1) * group)
            logits = inputs.q[row, heads].double() @ keys.T * HEAD_DIM**-0.5
            token = (block[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=DEVICE)).flatten()
            exact = logits.masked_fill(token > position, float("-inf")).softmax(-1) @ values
            square_error += float((out[row, heads].double() - exact).square().sum())
            square += float(exact.square().sum())
    return (square_error / square) ** 0.5


def sglang_operator(case: Case, inputs: Inputs) -> Callable[[tuple[Tensor, Tensor]], object] | None:
    """SGLang 0.5.23's operator on the same inputs, or None where it has none for the case."""
    if importlib.util.find_spec("sglang") is None or case.e4m3:
        return None
    if inputs.chosen is None:
        return dense_decode(inputs) if case.phase == "decode" else dense_extend(case, inputs)
    from sglang.kernels.ops.attention.minimax_sparse.decode.topk_sparse import (
        flash_decode_with_gqa_share_sparse,
    )
    from sglang.kernels.ops.attention.minimax_sparse.prefill.topk_sparse import (
        flash_prefill_with_gqa_share_sparse,
    )

    def int32(*values: int) -> Tensor:
        return torch.tensor(values, device=DEVICE, dtype=torch.int32)

    offset = torch.arange(BLOCK_TOKENS, device=DEVICE)
    slots = (inputs.page_table[:, :, None].long() * BLOCK_TOKENS + offset).flatten(1).int()
    requests = torch.arange(inputs.page_table.shape[0], device=DEVICE)

    def flat(layer: tuple[Tensor, Tensor]) -> list[Tensor]:
        return [pool.flatten(0, 1) for pool in layer]

    if case.phase == "decode":
        lengths = inputs.rows.position + 1
        return lambda layer: flash_decode_with_gqa_share_sparse(
            inputs.q, None, *flat(layer), slots, lengths, requests, BLOCK_TOKENS, inputs.chosen,
            page_size=BLOCK_TOKENS,
        )  # fmt: skip
    starts, length, prefix = int32(0, case.rows), int32(case.context + case.rows), int32(case.context)
    return lambda layer: flash_prefill_with_gqa_share_sparse(
        inputs.q, *flat(layer), None, slots, requests, inputs.chosen, 1, BLOCK_TOKENS, starts, length, prefix,
        case.rows, case.context + case.rows, cu_seqblocks_q=starts, max_seqblock_q=case.rows,
    )  # fmt: skip


def dense_decode(inputs: Inputs) -> Callable[[tuple[Tensor, Tensor]], object] | None:
    """FA3, SGLang's dense backend for M3 on Hopper, on the same pages; None where it does not load."""
    try:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache
    except ImportError:
        return None
    requests = len(inputs.rows)
    starts = torch.arange(requests + 1, device=DEVICE, dtype=torch.int32)
    table, lengths = inputs.page_table.contiguous(), inputs.rows.position + 1
    return lambda layer: flash_attn_with_kvcache(
        inputs.q, *layer, page_table=table, cache_seqlens=lengths, cu_seqlens_q=starts, max_seqlen_q=1,
        softmax_scale=HEAD_DIM**-0.5, causal=True,
    )  # fmt: skip


def dense_extend(case: Case, inputs: Inputs) -> Callable[[tuple[Tensor, Tensor]], object]:
    """SGLang's Triton extend kernel, which takes the new tokens' keys and values by themselves as well."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    offset = torch.arange(BLOCK_TOKENS, device=DEVICE)
    slots = (inputs.page_table[0, :, None].long() * BLOCK_TOKENS + offset).flatten()[
        : case.context + case.rows
    ]
    new = [pool.flatten(0, 1)[slots[case.context :]].contiguous() for pool in inputs.layers[0]]
    out = torch.empty_like(inputs.q)
    starts, cached = (
        torch.tensor([0, count], device=DEVICE, dtype=torch.int32) for count in (case.rows, case.context)
    )
    return lambda layer: extend_attention_fwd(
        inputs.q, *new, out, *(pool.flatten(0, 1) for pool in layer), starts, cached, slots[: case.context],
        None, True, None, case.rows, 1.0, 1.0, sm_scale=HEAD_DIM**-0.5, extend_seq_lens_cpu=[case.rows],
    )  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    table = []
    for case in CASES:
        inputs = make_inputs(case)
        run, out = ours(inputs)
        run(inputs.layers[0])
        layers = cycle(case, inputs)
        error = relative_error(inputs, inputs.layers[0], out)
        row = asdict(case) | {
            "error": error,
            "floor_us": floor_us(case, inputs),
            "ours_us": time_us(run, layers),
        }
        peer = sglang_operator(case, inputs)
        row["sglang_us"] = None if peer is None else time_us(peer, layers)
        table.append(row)
        selection = case.selection or "dense"
        peer_us = row["sglang_us"] or float("nan")
        print(
            f"{case.phase:6} ({case.q_heads:2},{case.kv_heads}) rows {case.rows:4} {selection:9}"
            f" shared {case.shared:d} e4m3 {case.e4m3:d} | ours {row['ours_us']:7.1f} us"
            f" | sglang {peer_us:7.1f} us | floor {row['floor_us']:6.1f} us"
            f" ({row['floor_us'] / row['ours_us']:4.0%}) | error {error:.1e}",
            flush=True,
        )
        del inputs, run, peer, layers
        torch.cuda.empty_cache()
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
