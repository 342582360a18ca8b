"""A whole sparse layer beside dense attention, one request of a million tokens, on one sm90 GPU.

    python -m bench_serving.operators_million [FILE]

prints a table and writes it to FILE as JSON. The sparse layer is `choose_blocks` and `attend_blocks` in one
CUDA graph, a decode step's several times, plus the prefix plan's share of one of 57 layers. Dense attention
is the fastest of SGLang's (FA3, its backend for M3 on Hopper, where `sgl_kernel` loads, and its Triton decode
kernel where SGLang is installed) and PyTorch's. PyTorch's get what is easiest for them: contiguous keys and
values, a decode step's grouped heads as rows, and, for an extend chunk, the cached tokens alone without a
mask.
"""

from __future__ import annotations

import importlib.util
import json
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from m3_kernels.rows import BLOCK_TOKENS, Rows
from m3_kernels.triton.sm90_attend_blocks import attend_blocks, attend_blocks_workspace_bytes
from m3_kernels.triton.sm90_choose_blocks import choose_blocks, choose_blocks_workspace_bytes
from m3_kernels.triton.sm90_plan_prefix import plan_prefix, plan_prefix_workspace_bytes
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench_serving.graph_time import time_us

CONTEXT_TOKENS = 1 << 20
HEAD_DIM, TOPK, SPARSE_LAYERS = 128, 16, 57
DEVICE = torch.device("cuda")
QUERY_CHANGE = 0.0005
"""Share of an index query's variance that is new from row to row: about one of 16 chosen blocks changes."""
DECODE_LAYERS = 6
"""Times that a decode step is in a graph; once through its index keys empties the L2 cache for the next."""
KV_SPLITS = (8, 128)
"""Splits tried for SGLang's Triton decode kernel; its default is the first."""
BACKENDS = {
    "PyTorch flash": SDPBackend.FLASH_ATTENTION,
    "PyTorch cuDNN": SDPBackend.CUDNN_ATTENTION,
}


@dataclass(frozen=True)
class Case:
    """`new` query tokens after the cached million, 1 in a decode step.

    Attributes:
        alike: index queries change slowly from row to row; otherwise they are independent.
        aim: how many times faster than dense attention the layer should be.
    """

    q_heads: int
    kv_heads: int
    new: int
    alike: bool
    aim: float


CASES = [
    Case(64, 4, 1, False, 6.5),
    Case(8, 1, 1, False, 1.7),
    Case(8, 1, 8192, True, 9.7),
    Case(64, 4, 8192, True, 18),
    Case(8, 1, 8192, False, 9.7),
    Case(64, 4, 8192, False, 18),
]


@dataclass(frozen=True)
class Layer:
    """One layer's inputs; pages lie in random physical order."""

    q: Tensor
    k: Tensor
    v: Tensor
    index_q: Tensor
    index_k: Tensor
    page_table: Tensor
    rows: Rows


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def make_layer(case: Case) -> Layer:
    blocks = -(-(CONTEXT_TOKENS + case.new) // BLOCK_TOKENS)
    token = torch.arange(case.new, device=DEVICE, dtype=torch.int32)
    index_q = torch.randn(case.new, case.kv_heads, HEAD_DIM, device=DEVICE, dtype=torch.float64)
    if case.alike:
        # A first-order autoregression of unit variance, as a weighted running sum.
        fade = (1 - QUERY_CHANGE) ** (token.double() / 2)[:, None, None]
        index_q[1:] *= QUERY_CHANGE**0.5
        index_q = (index_q / fade).cumsum(0) * fade
    return Layer(
        q=normal(case.new, case.q_heads, HEAD_DIM),
        k=normal(blocks, BLOCK_TOKENS, case.kv_heads, HEAD_DIM),
        v=normal(blocks, BLOCK_TOKENS, case.kv_heads, HEAD_DIM),
        index_q=index_q.bfloat16(),
        index_k=normal(blocks, BLOCK_TOKENS, 1, HEAD_DIM),
        page_table=torch.randperm(blocks, device=DEVICE).int()[None],
        rows=Rows(torch.zeros_like(token), CONTEXT_TOKENS + token),
    )


def sparse_layer(layer: Layer) -> tuple[Callable[[], Tensor], Callable[[], Tensor], Callable[[], object]]:
    """`choose_blocks`, `attend_blocks` to what it chose, and `plan_prefix`."""
    new, q_heads, _ = layer.q.shape
    pages, _, kv_heads, _ = layer.k.shape
    spaces = [
        torch.empty(size, dtype=torch.uint8, device=DEVICE)
        for size in (
            plan_prefix_workspace_bytes(new, 1),
            choose_blocks_workspace_bytes(new, kv_heads, pages),
            attend_blocks_workspace_bytes(new, q_heads, kv_heads, HEAD_DIM, topk=TOPK, pages=pages),
        )
    ]
    chosen = torch.empty(kv_heads, new, TOPK, dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(layer.q)
    plan = plan_prefix(layer.page_table, layer.rows, workspace=spaces[0])

    def choose() -> Tensor:
        return choose_blocks(
            layer.index_q,
            layer.index_k,
            layer.page_table,
            layer.rows,
            plan,
            topk=TOPK,
            init_blocks=0,
            local_blocks=1,
            workspace=spaces[1],
            out=chosen,
        )

    def attend() -> Tensor:
        return attend_blocks(
            layer.q,
            layer.k,
            layer.v,
            layer.page_table,
            layer.rows,
            chosen,
            scale=HEAD_DIM**-0.5,
            workspace=spaces[2],
            out=out,
        )

    return choose, attend, lambda: plan_prefix(layer.page_table, layer.rows, workspace=spaces[0])


def torch_dense(layer: Layer, backend: SDPBackend) -> Callable[[], Tensor]:
    """PyTorch's attention to the cached tokens, pages taken as they lie."""
    new, q_heads, _ = layer.q.shape
    kv_heads = layer.k.shape[2]
    keys, values = (pool.flatten(0, 1)[:CONTEXT_TOKENS].transpose(0, 1)[None] for pool in (layer.k, layer.v))
    if new == 1:
        queries, grouped = layer.q.view(1, kv_heads, q_heads // kv_heads, HEAD_DIM), False
    else:
        queries, grouped = layer.q.transpose(0, 1)[None], True

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(queries, keys, values, enable_gqa=grouped)

    return run


def slots(layer: Layer) -> Tensor:
    """Pool slot of every token, `[tokens]` int64, as SGLang's dense kernels take them."""
    offset = torch.arange(BLOCK_TOKENS, device=DEVICE)
    return (layer.page_table[0, :, None].long() * BLOCK_TOKENS + offset).flatten()


def sglang_decode(layer: Layer, splits: int) -> Callable[[], object]:
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    heads = layer.q.shape[1]
    starts = torch.tensor([0, CONTEXT_TOKENS + 1], device=DEVICE, dtype=torch.int32)
    parts = torch.empty(1, heads, splits, HEAD_DIM, device=DEVICE)
    split_count = torch.tensor([splits], device=DEVICE, dtype=torch.int32)
    pools = [pool.flatten(0, 1) for pool in (layer.k, layer.v)]
    indices, out = slots(layer)[: CONTEXT_TOKENS + 1], torch.empty_like(layer.q)
    lse = torch.empty(1, heads, splits, device=DEVICE)
    return lambda: decode_attention_fwd(
        layer.q, *pools, out, starts, indices, parts, lse, split_count, splits, HEAD_DIM**-0.5, 1.0, 1.0
    )


def flash_attention_3(layer: Layer) -> Callable[[], object] | None:
    """SGLang's build of FA3 on the same pages; None where it does not load."""
    try:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache
    except ImportError:
        return None
    new = len(layer.rows)
    lengths = torch.tensor([CONTEXT_TOKENS + new], device=DEVICE, dtype=torch.int32)
    starts = torch.tensor([0, new], device=DEVICE, dtype=torch.int32)
    return lambda: flash_attn_with_kvcache(
        layer.q,
        layer.k,
        layer.v,
        page_table=layer.page_table,
        cache_seqlens=lengths,
        cu_seqlens_q=starts,
        max_seqlen_q=new,
        softmax_scale=HEAD_DIM**-0.5,
        causal=True,
    )


def dense_runs(case: Case, layer: Layer) -> Iterator[tuple[str, Callable[[], object]]]:
    flash = flash_attention_3(layer)
    if flash is not None:
        yield "FA3", flash
    for name, backend in BACKENDS.items():
        yield name, torch_dense(layer, backend)
    if case.new == 1 and importlib.util.find_spec("sglang") is not None:
        for splits in KV_SPLITS:
            yield f"SGLang Triton, {splits} splits", sglang_decode(layer, splits)


def time_once_us(run: Callable[[], object]) -> float:
    """Microseconds of one call, too long for its launch to count, after another."""
    run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def measure(case: Case, known: dict[str, float]) -> dict[str, object]:
    """A row of the table; `known` are dense times of an earlier case that differs in the selection alone."""
    layer = make_layer(case)
    choose, attend, plan = sparse_layer(layer)
    repeats = 20 if case.new == 1 else 3
    chosen = choose().long()
    changed = 0.0
    if case.new > 1:
        kept = (chosen[:, 1:, :, None] == chosen[:, :-1, None, :]).any(-1)
        changed = TOPK * (1 - float(kept.float().mean()))
    # A decode step's launches overlap from layer to layer, and no layer finds its keys in the L2 cache.
    layers = DECODE_LAYERS if case.new == 1 else 1
    choose_us, attend_us, plan_us, both_us = (
        time_us(operator.call, [run] * layers, repeats)
        for run in (choose, attend, plan, lambda: (choose(), attend()))
    )
    layer_us = both_us + plan_us / SPARSE_LAYERS
    dense = dict(known)
    for name, run in () if known else dense_runs(case, layer):
        try:
            dense[name] = (
                time_us(operator.call, [run] * layers, repeats) if case.new == 1 else time_once_us(run)
            )
        except (RuntimeError, ImportError, AttributeError) as error:
            # A backend does not take the shape, or FA3 is in a library that was left out.
            print(f"  {name} cannot: {str(error).splitlines()[0][:120]}", flush=True)
    best = min(dense, key=dense.__getitem__)
    row = asdict(case) | {
        "changed_per_row": changed,
        "choose_us": choose_us,
        "attend_us": attend_us,
        "plan_us": plan_us,
        "layer_us": layer_us,
        "dense_us": dense,
        "fastest_dense": best,
        "ratio": dense[best] / layer_us,
    }
    print(
        f"({case.q_heads},{case.kv_heads}) new {case.new} changed {changed:.1f} | layer {layer_us:,.1f} us"
        f" (choose {choose_us:,.1f}, attend {attend_us:,.1f}) | dense {dense[best]:,.1f} ({best})"
        f" | {row['ratio']:.1f}x, aim {case.aim}x",
        flush=True,
    )
    return row


def main() -> None:
    torch.manual_seed(0)
    table: list[dict[str, object]] = []
    dense: dict[tuple[int, int], dict[str, float]] = {}
    for case in CASES:
        row = measure(case, dense.get((case.q_heads, case.new), {}))
        dense[case.q_heads, case.new] = row["dense_us"]
        table.append(row)
        torch.cuda.empty_cache()
        if len(sys.argv) > 1:
            with open(sys.argv[1], "w") as file:
                json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
