"""The real model takes a real checkpoint, whole or as any rank of several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sglang_m3.models import vision
from sglang_m3.models.loading import WeightError
from sglang_m3.models.minimax_m3 import MiniMaxM3SparseForConditionalGeneration
from sglang_m3.tiny import TinyConfig
from sglang_m3.tiny import build as build_checkpoint
from tests.models.building import as_rank, build, tensors

CONFIG = TinyConfig(
    layers=3,
    vocab=512,
    hidden=96,
    heads=8,
    kv_heads=2,
    experts=4,
    vision_layers=1,
    vision_hidden=128,
    vision_heads=8,
)
"""Heads for eight ranks, of which four then share a kv head."""

TEXT = "language_model.model.layers"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("ranks") / "tiny", CONFIG)


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in tensors(checkpoint)}


def load(checkpoint: Path, rank: int = 0, **parallel: int) -> MiniMaxM3SparseForConditionalGeneration:
    with as_rank(checkpoint, rank, **parallel) as config:
        model = build(config)
        model.load_weights(tensors(checkpoint))
    return model


def unfilled(model: MiniMaxM3SparseForConditionalGeneration) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.isnan().any()}


def test_a_checkpoint_fills_every_parameter_of_the_model(checkpoint: Path) -> None:
    assert unfilled(load(checkpoint)) == set(vision.UNUSED_PARAMETERS)


def test_a_checkpoint_that_lacks_a_tensor_does_not_load(checkpoint: Path) -> None:
    lost = f"{TEXT}.1.block_sparse_moe.experts.2.w3.weight"
    with as_rank(checkpoint) as config:
        model = build(config)
        with pytest.raises(WeightError, match=rf"1 missing: {lost}"):
            model.load_weights(pair for pair in tensors(checkpoint) if pair[0] != lost)


def test_after_the_first_load_and_after_dummy_weights_single_tensors_are_taken(
    checkpoint: Path, whole: dict[str, Tensor]
) -> None:
    name = f"{TEXT}.1.self_attn.v_proj.weight"
    with as_rank(checkpoint) as config:
        model = build(config)
        model.post_load_weights()
        model.load_weights([(name, whole[name] + 1)])
    weight = model.get_parameter("model.layers.1.self_attn.qkv_proj.weight")
    rows = whole[name].shape[0]
    assert torch.equal(weight[-rows:], whole[name] + 1)
    assert weight[:-rows].isnan().all()


@pytest.mark.parametrize("tp", (1, 2, 4, 8))
def test_attention_of_every_rank_has_its_heads(checkpoint: Path, whole: dict[str, Tensor], tp: int) -> None:
    path, dim = f"{TEXT}.2.self_attn", CONFIG.head_dim
    for rank in range(tp):
        attention = load(checkpoint, rank, tp=tp).model.layers[2].self_attn
        kv_heads = max(1, CONFIG.kv_heads // tp)
        first = rank * CONFIG.kv_heads // tp
        own = {
            "q": slice(rank * CONFIG.heads // tp * dim, (rank + 1) * CONFIG.heads // tp * dim),
            "kv": slice(first * dim, (first + kv_heads) * dim),
        }
        want = torch.cat(
            [
                whole[f"{path}.q_proj.weight"][own["q"]],
                whole[f"{path}.k_proj.weight"][own["kv"]],
                whole[f"{path}.v_proj.weight"][own["kv"]],
            ]
        )
        assert torch.equal(attention.qkv_proj.weight, want), f"rank {rank}: q, k, v"
        # An index head chooses for the kv head of its number; there is one index key.
        index_q = whole[f"{path}.index_q_proj.weight"][own["kv"]]
        want = torch.cat([index_q, whole[f"{path}.index_k_proj.weight"]])
        assert torch.equal(attention.index_qkv_proj.weight, want), f"rank {rank}: index"
        assert torch.equal(attention.o_proj.weight, whole[f"{path}.o_proj.weight"][:, own["q"]])
        assert (attention.q_heads, attention.kv_heads, attention.index_qkv_proj.num_heads) == (
            CONFIG.heads // tp,
            kv_heads,
            kv_heads,
        )


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (2, 2), (4, 2), (4, 4)])
def test_experts_of_every_rank_are_its_share(
    checkpoint: Path, whole: dict[str, Tensor], tp: int, ep: int
) -> None:
    path, inner = f"{TEXT}.1.block_sparse_moe", CONFIG.expert_intermediate // (tp // ep)
    for rank in range(tp):
        moe = load(checkpoint, rank, tp=tp, ep=ep).model.layers[1].mlp
        group, part = divmod(rank, tp // ep)
        columns = slice(part * inner, (part + 1) * inner)
        here = CONFIG.experts // ep
        for local in range(here):
            expert = f"{path}.experts.{group * here + local}"
            gate_up = torch.cat([whole[f"{expert}.{shard}.weight"][columns] for shard in ("w1", "w3")])
            assert torch.equal(moe.experts.w13_weight[local], gate_up), f"rank {rank}: {expert} w1, w3"
            w2 = whole[f"{expert}.w2.weight"][:, columns]
            assert torch.equal(moe.experts.w2_weight[local], w2), f"rank {rank}: {expert} w2"
        assert torch.equal(moe.gate.weight, whole[f"{path}.gate.weight"])


def test_pipeline_stages_have_the_layers_between_them_and_only_those(checkpoint: Path) -> None:
    stages = [load(checkpoint, rank, pp=3) for rank in range(3)]
    names = [{name for name, _ in stage.named_parameters()} for stage in stages]
    whole_model = {name for name, _ in load(checkpoint).named_parameters()}
    assert set.union(*names) == whole_model
    for number, (stage, own) in enumerate(zip(stages, names)):
        assert unfilled(stage) <= set(vision.UNUSED_PARAMETERS)
        assert {name.split(".")[2] for name in own if name.startswith("model.layers.")} == {str(number)}
        assert ("model.embed_tokens.weight" in own, "lm_head.weight" in own) == (number == 0, number == 2)
