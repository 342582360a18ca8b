"""Checks the operators against brute force inside a running engine, on what the engine gives them.

SGLang imports the package that `SGLANG_EXTERNAL_MODEL_PACKAGE` names in its scheduler; importing this one
puts checks around `m3_kernels.choose_blocks` and `attend_blocks` where `SHADOW_CHECK` is 1, and the reference
operators in the kernels' place where it is `reference` or `float32`; with the latter a model in float32 is
served, all of whose CUDA kernels for half precision are replaced. It also notes when Triton compiles or loads
a kernel. Findings are appended to `SHADOW_FILE` as JSON lines. Where the plugin serves, the first prompt of
at least `SHADOW_CACHE_TOKENS` tokens leaves its cache in `SHADOW_CACHE` at its first decode step.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

import m3_kernels
import torch

BLOCK_TOKENS = 128
CHECKED_ROWS = 24

_out = Path(os.environ["SHADOW_FILE"])
_choose, _attend = m3_kernels.choose_blocks, m3_kernels.attend_blocks


def _write(**finding: Any) -> None:
    with _out.open("a") as stream:
        stream.write(json.dumps(finding) + "\n")


def _some_rows(rows: Any) -> list[int]:
    valid = torch.where(rows.request >= 0)[0].tolist()
    step = max(1, len(valid) // CHECKED_ROWS)
    return valid[::step]


def _tokens(pages: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """`[length, heads, D]` float64: a request's tokens in order."""
    blocks = -(-length // BLOCK_TOKENS)
    return pages[table[:blocks].long()].flatten(0, 1)[:length].double()


def choose_blocks(index_q, index_k, page_table, rows, plan, *, topk, init_blocks, local_blocks, **rest):
    """Every chosen block's float64 score is at least every other block's, up to rounding."""
    chosen = _choose(
        index_q,
        index_k,
        page_table,
        rows,
        plan,
        topk=topk,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        **rest,
    )
    worst, different, count = 0.0, 0, 0
    if not (index_q.is_cuda and torch.cuda.is_current_stream_capturing()):
        for row in _some_rows(rows):
            length = int(rows.position[row]) + 1
            keys = _tokens(index_k, page_table[rows.request[row]], length)[:, 0]
            blocks = -(-length // BLOCK_TOKENS)
            scores = torch.full((index_q.shape[1], blocks * BLOCK_TOKENS), -torch.inf, dtype=torch.float64)
            scores = scores.to(keys.device)
            scores[:, :length] = index_q[row].double() @ keys.T
            scores = scores.view(-1, blocks, BLOCK_TOKENS).amax(-1)
            size = scores.abs().amax()
            scores[:, :init_blocks] = torch.inf
            scores[:, max(0, blocks - local_blocks) :] = torch.inf
            wanted = min(topk, blocks)
            for head in range(scores.shape[0]):
                got = chosen[head, row]
                assert (got[:wanted] >= 0).all() and (got[wanted:] < 0).all(), (row, got)
                assert (got[1:wanted] > got[: wanted - 1]).all(), (row, got)
                best = scores[head].topk(wanted)
                others = torch.ones(blocks, dtype=torch.bool, device=got.device)
                others[got[:wanted].long()] = False
                count += 1
                different += int(set(best.indices.tolist()) != set(got[:wanted].tolist()))
                if others.any():
                    lowest = scores[head][got[:wanted].long()].min()
                    worst = max(worst, float((scores[head][others].max() - lowest) / size))
        _write(op="choose", rows=len(rows), rows_checked=count, other_set=different, worst_relative=worst)
    return chosen


def attend_blocks(q, k, v, page_table, rows, chosen, *, scale, workspace, out):
    """Compare with a float64 softmax over the chosen blocks' visible tokens."""
    _attend(q, k, v, page_table, rows, chosen, scale=scale, workspace=workspace, out=out)
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return out
    kv_heads = k.shape[2]
    group = q.shape[1] // kv_heads
    worst, size = 0.0, 0.0
    for row in _some_rows(rows)[::4]:
        length = int(rows.position[row]) + 1
        table = page_table[rows.request[row]]
        keys, values = _tokens(k, table, length), _tokens(v, table, length)
        block = torch.arange(length, device=q.device) // BLOCK_TOKENS
        for head in range(kv_heads):
            everything = torch.ones_like(block, dtype=torch.bool)
            visible = everything if chosen is None else torch.isin(block, chosen[head, row])
            heads = slice(head * group, (head + 1) * group)
            weights = (q[row, heads].double() @ keys[visible, head].T * scale).softmax(-1)
            want = weights @ values[visible, head]
            worst = max(worst, float((out[row, heads].double() - want).abs().max()))
            size = max(size, float(want.abs().max()))
    _write(op="attend", rows=len(rows), worst=worst, largest=size)
    return out


OPERATORS = ("plan_prefix", "choose_blocks", "attend_blocks", "store_tokens")

if os.environ.get("SHADOW_CHECK") == "1":
    m3_kernels.choose_blocks, m3_kernels.attend_blocks = choose_blocks, attend_blocks
if os.environ.get("SHADOW_CHECK") in ("reference", "float32"):
    for name in OPERATORS:
        module = importlib.import_module(f"m3_kernels.reference.{name}")
        setattr(m3_kernels, name, getattr(module, name))


def _serve_in_float32() -> None:
    """What `SGLANG_FORCE_FUSED_OP_BACKEND=torch` does not replace: the plugin's fusions, and M3's activation
    in SGLang's plain experts, which the plugin corrects on the CPU only."""
    from sglang.srt.layers.moe import fused_moe_native

    from sglang_m3.models import fusions
    from sglang_m3.platforms.cpu_experts import around_moe_forward_native

    torch.backends.cuda.matmul.allow_tf32 = False
    fusions.norm_and_rotate_is_fused = lambda *_: False
    fusions.all_reduce_is_fused = lambda: False
    plain = fused_moe_native.moe_forward_native
    fused_moe_native.moe_forward_native = functools.partial(around_moe_forward_native, plain)


if os.environ.get("SHADOW_CHECK") == "float32":
    _serve_in_float32()


def _count_compiles() -> None:
    from triton import knobs

    def compiled(*, fn: Any, **_: Any) -> None:
        _write(op="compile", kernel=fn.name, at=time.monotonic())

    knobs.runtime.jit_post_compile_hook = compiled


_count_compiles()


def _keep_cache(path: Path, tokens: int) -> None:
    from sglang_m3.attention.backend import M3SparseBackend

    prepare = M3SparseBackend.init_forward_metadata_out_graph

    def prepare_and_keep(self: M3SparseBackend, forward_batch: Any, in_capture: bool = False) -> None:
        prepare(self, forward_batch, in_capture)
        decodes = forward_batch.forward_mode.is_decode() and not in_capture
        if not decodes or path.exists() or int(forward_batch.seq_lens.max()) <= tokens:
            return
        requests = forward_batch.req_pool_indices[:1].long()
        slots = self.req_to_token_pool.req_to_token[requests, :tokens].long().view(-1)
        pool, kept = self.token_to_kv_pool, {}
        for layer in range(self._last_layer + 1):
            keys, values = pool.get_kv_buffer(layer)
            kept |= {(layer, "keys"): keys[slots].cpu(), (layer, "values"): values[slots].cpu()}
            if layer in self.sparse_layer_ids:
                kept[layer, "index keys"] = pool.pages(layer).index_k.flatten(0, 1)[slots].cpu()
        torch.save(kept, path)

    M3SparseBackend.init_forward_metadata_out_graph = prepare_and_keep


if os.environ.get("SGLANG_PLUGINS") != "none" and "SHADOW_CACHE" in os.environ:
    _keep_cache(Path(os.environ["SHADOW_CACHE"]), int(os.environ["SHADOW_CACHE_TOKENS"]))
