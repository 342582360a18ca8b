"""What each rank of TP and EP keeps and computes adds up to the whole layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from m3_kernels import mxfp8_experts, mxfp8_linear, quantize_mxfp8
from sglang.srt import runtime_context
from sglang.srt.layers.linear import QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.server_args import ServerArgs
from torch import Tensor

from sglang_m3.quantization.config import M3MxFp8Config

EXPERTS, HIDDEN, INNER, TOPK, TOKENS = 6, 96, 128, 2, 23
ALPHA, LIMIT = 1.702, 7.0
EXPERT_SHAPES = {"w1": (INNER, HIDDEN), "w2": (HIDDEN, INNER), "w3": (INNER, HIDDEN)}


@contextmanager
def rank_of(checkpoint: Path, rank: int, ep: int, tp: int) -> Iterator[None]:
    """Layers are built as on one rank of `ep * tp`."""
    parallel = {
        "tp_size": ep * tp,
        "tp_rank": rank,
        "attn_tp_size": ep * tp,
        "attn_tp_rank": rank,
        "moe_ep_size": ep,
        "moe_ep_rank": rank // tp,
        "moe_tp_size": tp,
        "moe_tp_rank": rank % tp,
    }
    args = ServerArgs(model_path=str(checkpoint), dtype="float32", skip_tokenizer_init=True)
    args.resolve_once()
    ranks = runtime_context.SpawnRanks(world_rank=0)
    context = runtime_context.create_context(args, role="scheduler", ranks=ranks)
    with runtime_context.use_context(context), runtime_context.get_parallel().override(**parallel):
        yield


def matrix(generator: torch.Generator, rows: int, columns: int, scale: float = 4.0) -> Tensor:
    return (torch.randn(rows, columns, generator=generator) * scale / columns**0.5).bfloat16()


def load_experts(layer: Any, weights: dict[str, list[Tensor]], origin: str) -> None:
    for shard, of_experts in weights.items():
        name = "layer.mlp.experts.w2_weight" if shard == "w2" else "layer.mlp.experts.w13_weight"
        parameter = layer.get_parameter(name.rpartition(".")[2])
        for expert, weight in enumerate(of_experts):
            if origin == "plain":
                parameter.weight_loader(parameter, weight, name, shard_id=shard, expert_id=expert)
                continue
            for suffix, value in zip(("", "_scale_inv"), quantize_mxfp8(weight)):
                parameter = layer.get_parameter(name.rpartition(".")[2] + suffix)
                parameter.weight_loader(parameter, value, name + suffix, shard_id=shard, expert_id=expert)


@pytest.mark.parametrize("origin", ["plain", "mxfp8"])
@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (3, 1), (1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("load", ["plugin's model file"], indirect=True)
@pytest.mark.usefixtures("load")
def test_experts_of_all_ranks_add_up_to_the_layer(plain: Path, origin: str, ep: int, tp: int) -> None:
    generator = torch.Generator().manual_seed(ep * 10 + tp)
    weights = {
        name: [matrix(generator, *shape) for _ in range(EXPERTS)] for name, shape in EXPERT_SHAPES.items()
    }
    x = torch.randn(TOKENS, HIDDEN, generator=generator) * 3
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(TOKENS)]).int()
    gates = torch.rand(TOKENS, TOPK, generator=generator) + 0.1
    total = torch.zeros_like(x)
    for rank in range(ep * tp):
        with rank_of(plain, rank, ep, tp):
            layer = FusedMoE(
                num_experts=EXPERTS,
                hidden_size=HIDDEN,
                intermediate_size=INNER,
                layer_id=0,
                top_k=TOPK,
                quant_config=M3MxFp8Config(origin),
                prefix="layer.mlp.experts",
                gemm1_alpha=ALPHA,
                gemm1_clamp_limit=LIMIT,
                gate_up_interleaved=False,
            )
            load_experts(layer, weights, origin)
            layer.quant_method.process_weights_after_loading(layer)
            first, here = rank // tp * (EXPERTS // ep), EXPERTS // ep
            local = torch.where((ids >= first) & (ids < first + here), ids - first, -1)
            given = StandardDispatchOutput(x, None, StandardTopKOutput(gates, local, None))
            total += layer.quant_method.apply(layer, given).hidden_states
    whole = {
        name: [torch.stack(part) for part in zip(*map(quantize_mxfp8, of))] for name, of in weights.items()
    }
    w13, w13_scale = (torch.cat([gate, up], 1) for gate, up in zip(whole["w1"], whole["w3"]))
    want = mxfp8_experts(
        x, w13, w13_scale, *whole["w2"], ids, gates, alpha=ALPHA, limit=LIMIT, first_expert=0
    )
    torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("origin", ["plain", "mxfp8"])
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("load", ["plugin's model file"], indirect=True)
@pytest.mark.usefixtures("load")
def test_linears_of_all_ranks_give_the_whole_product(plain: Path, origin: str, tp: int) -> None:
    generator = torch.Generator().manual_seed(tp)
    heads, kv_heads, head, out = 12, 6, 32, 40
    parts = {
        "q": matrix(generator, heads * head, HIDDEN),
        "k": matrix(generator, kv_heads * head, HIDDEN),
        "v": matrix(generator, kv_heads * head, HIDDEN),
    }
    down = matrix(generator, out, heads * head)
    x = torch.randn(7, HIDDEN, generator=generator)
    rows: dict[str, list[Tensor]] = {name: [] for name in parts}
    total = torch.zeros(7, out)
    hidden = torch.randn(7, heads * head, generator=generator)
    for rank in range(tp):
        with rank_of(plain, rank, 1, tp):
            config = M3MxFp8Config(origin)
            qkv = QKVParallelLinear(
                HIDDEN,
                head,
                heads,
                kv_heads,
                bias=False,
                quant_config=config,
                prefix="layer.self_attn.qkv_proj",
                parallel_group="attn_tp",
            )
            o = RowParallelLinear(
                heads * head,
                out,
                bias=False,
                quant_config=config,
                prefix="layer.self_attn.o_proj",
                parallel_group="attn_tp",
                reduce_results=False,
            )
        for layer, tensors in ((qkv, parts), (o, {None: down})):
            for shard, weight in tensors.items():
                given = (weight,) if origin == "plain" else quantize_mxfp8(weight)
                for suffix, value in zip(("", "_scale_inv"), given):
                    parameter = layer.get_parameter("weight" + suffix)
                    parameter.weight_loader(parameter, value, *(() if shard is None else (shard,)))
            layer.quant_method.process_weights_after_loading(layer)
        sizes = [heads * head // tp, kv_heads * head // tp, kv_heads * head // tp]
        for name, part in zip(parts, qkv.quant_method.apply(qkv, x).split(sizes, -1)):
            rows[name].append(part)
        total += o.quant_method.apply(o, hidden.chunk(tp, -1)[rank])
    for name, weight in parts.items():
        torch.testing.assert_close(torch.cat(rows[name], -1), mxfp8_linear(x, *quantize_mxfp8(weight)))
    torch.testing.assert_close(total, mxfp8_linear(hidden, *quantize_mxfp8(down)), rtol=1e-5, atol=1e-5)
