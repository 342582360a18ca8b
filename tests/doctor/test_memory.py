"""Memory by arithmetic: against the published checkpoint's size, and against what SGLang really allocates."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sglang_m3.attention.workspace import StepShape, bytes_needed
from sglang_m3.config import M3Config
from sglang_m3.doctor import published
from sglang_m3.doctor.memory import (
    Parallel,
    StepSizes,
    check_division,
    index_bytes_per_token,
    kv_bytes_per_token,
    operator_workspaces,
    rank_memory,
    weight_bytes,
)
from sglang_m3.tiny import TinyConfig
from sglang_m3.tiny.config import model_config
from sglang_m3.tiny.weights import tensor_specs

GIB = 2**30
RELEASED = M3Config.read(json.loads(published.CONFIG.read_text()))
H200 = 139 * GIB


def test_all_values_of_the_published_checkpoint_are_counted() -> None:
    """427,040,140,160 values (NVIDIA Megatron-Bridge's verification page of the release); biases are not."""
    counted = weight_bytes(RELEASED, Parallel(), "bfloat16").total / 2
    assert counted == pytest.approx(427_040_140_160, rel=1e-5)


@pytest.mark.parametrize("config", [TinyConfig(), TinyConfig(layers=4, dense_layers=2, experts=6, vocab=576)])
def test_all_values_of_a_tiny_checkpoint_are_counted(config: TinyConfig) -> None:
    text_only = replace(M3Config.read(model_config(config)), vision=None)
    values = 0
    for spec in tensor_specs(config):
        if spec.name.startswith("language_model."):
            count = 1
            for size in spec.shape:
                count *= size
            # Biases of the router stay float32.
            values += count * (2 if spec.name.endswith("e_score_correction_bias") else 1)
    assert weight_bytes(text_only, Parallel(), "bfloat16").total == 2 * values


def test_ranks_share_everything_but_repeated_heads_and_what_each_needs() -> None:
    whole, share = (weight_bytes(RELEASED, Parallel(n, n), "bfloat16") for n in (1, 8))
    assert share.experts * 8 == whole.experts and share.dense_mlp * 8 == whole.dense_mlp
    # 4 kv heads on 8 ranks: q and o are divided, k and v are repeated twice.
    assert share.attention * 8 == whole.attention * (64 + 8) // (64 + 4)
    assert share.router == whole.router and share.norms == whole.norms


def test_experts_are_divided_alike_with_and_without_expert_parallelism() -> None:
    shares = {weight_bytes(RELEASED, Parallel(8, ep), "bfloat16").experts for ep in (1, 2, 4, 8)}
    assert len(shares) == 1


def test_mxfp8_takes_33_of_64_bytes_where_it_quantises_and_nothing_elsewhere() -> None:
    plain, quantized = (weight_bytes(RELEASED, Parallel(8, 8), kind) for kind in ("bfloat16", "mxfp8"))
    for part in ("attention", "index", "dense_mlp", "shared_experts", "experts"):
        assert getattr(quantized, part) * 64 == getattr(plain, part) * 33, part
    for part in ("embedding", "output", "router", "norms", "vision"):
        assert getattr(quantized, part) == getattr(plain, part), part


@pytest.mark.parametrize(
    ("parallel", "kv", "index"),
    [
        (Parallel(1), 122_880, 14_592),
        (Parallel(4), 30_720, 14_592),
        (Parallel(8), 30_720, 14_592),
        (Parallel(8, attention_dp=8), 122_880, 14_592),
        (Parallel(8, pp=2), 15_360, 30 * 256),
    ],
    ids=str,
)
def test_bytes_of_a_cached_token(parallel: Parallel, kv: int, index: int) -> None:
    assert (kv_bytes_per_token(RELEASED, parallel), index_bytes_per_token(RELEASED, parallel)) == (kv, index)
    assert kv_bytes_per_token(RELEASED, parallel, 1) * 2 == kv


def test_a_node_of_h200_holds_ten_times_the_context_in_mxfp8_at_the_published_fraction() -> None:
    step = StepSizes(rows=8192, requests=64, context_tokens=1_048_576)
    bf16, mxfp8 = (
        rank_memory(RELEASED, Parallel(8, 8), weights=kind, free_bytes=H200, static_fraction=0.8, step=step)
        for kind in ("bfloat16", "mxfp8")
    )
    assert 200_000 < bf16.tokens < 350_000 and 1_200_000 < mxfp8.tokens < 1_500_000
    for memory in (bf16, mxfp8):
        assert memory.tokens % 128 == 0
        per_token = memory.kv_per_token + memory.index_per_token
        assert 0 <= memory.cache - memory.tokens * per_token < 128 * per_token
        assert memory.cache + memory.static == int(H200 * 0.8)


@pytest.mark.parametrize("parallel", [Parallel(1), Parallel(8), Parallel(8, attention_dp=2)], ids=str)
@pytest.mark.parametrize(
    "step", [StepSizes(384, 7, 5000), StepSizes(100, 300, 131_072), StepSizes(129, 65, 4096, 4)], ids=str
)
def test_workspaces_are_those_that_a_server_allocates(parallel: Parallel, step: StepSizes) -> None:
    kv_heads = max(1, 4 // parallel.attention_tp)
    decode_rows = step.requests * max(1, step.draft_tokens)
    shape = StepShape(
        rows=max(step.rows, decode_rows),
        requests=step.requests,
        blocks=-(-(step.context_tokens + step.draft_tokens) // 128),
        pages=1000,
        q_heads=64 // parallel.attention_tp,
        kv_heads=kv_heads,
        index_heads=kv_heads,
        head_dim=128,
        topk=16,
    )
    assert operator_workspaces(RELEASED, parallel, step, 1000) == sum(bytes_needed(shape))


def test_what_does_not_fit_leaves_no_tokens() -> None:
    memory = rank_memory(
        RELEASED, Parallel(8, 8), weights="bfloat16", free_bytes=79 * GIB, static_fraction=0.8
    )
    assert memory.tokens == 0 and memory.cache < 0


@pytest.mark.parametrize(
    ("parallel", "wrong"),
    [
        (Parallel(8, 8), []),
        (Parallel(2, 1), []),
        (Parallel(3), ["64 attention heads", "4 kv heads"]),
        (Parallel(6, 6), ["64 attention heads", "4 kv heads", "128 experts"]),
        (Parallel(128, 128), ["64 attention heads"]),
        (Parallel(1, pp=61), ["60 layers"]),
    ],
    ids=str,
)
def test_sizes_that_do_not_divide_are_named(parallel: Parallel, wrong: list[str]) -> None:
    found = check_division(RELEASED, parallel)
    assert len(found) >= len(wrong) and (found == [] or wrong)
    for text in wrong:
        assert any(text in problem for problem in found), found


@pytest.mark.parametrize("sizes", [{"tp": 4, "ep": 3}, {"tp": 0}, {"tp": 4, "attention_dp": 8}], ids=str)
def test_parallel_sizes_that_contradict_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        Parallel(**sizes)
