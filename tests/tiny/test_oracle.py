"""transformers loads the checkpoint whole, and the model it builds is a useful and well-behaved oracle.

Useful: one wrong block, a missing expert or a wrong image moves log-probabilities far more than the 1e-5 that
the served model is held to. Well-behaved: rounding alone stays below.
"""

from __future__ import annotations

import inspect
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, DynamicCache, PreTrainedTokenizerBase

from sglang_m3.tiny import TinyConfig
from tests.oracle import Model, OracleRun, indexers, load_oracle, logprobs, run, selected_blocks

TOKENS = 1111
"""Nine blocks, the last one partial: more than twice as many as a row may choose."""
SPARSE = list(TinyConfig().sparse_layers)
TOLERANCE = 1e-5
"""The difference in log-probability that the served model is allowed."""


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Model:
    return load_oracle(checkpoint)


@pytest.fixture(scope="module")
def token_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer.encode(inspect.getsource(subprocess))[:TOKENS]


@pytest.fixture(scope="module")
def reference(model: Model, token_ids: list[int]) -> OracleRun:
    return run(model, token_ids)


def hooked(
    module: torch.nn.Module, hook: Callable[..., Any], model: Model, token_ids: list[int]
) -> torch.Tensor:
    handle = module.register_forward_hook(hook)
    try:
        return logprobs(model, token_ids)
    finally:
        handle.remove()


def test_transformers_reads_the_config_as_meant(model: Model) -> None:
    text, config = model.config.text_config, TinyConfig()
    assert text.layer_types == ["full_attention"] + ["minimax_m3_sparse"] * 4
    assert text.mlp_layer_types == ["dense"] + ["sparse"] * 4
    sizes = (text.index_n_heads, text.index_head_dim, text.index_block_size, text.index_topk_blocks)
    assert sizes == (config.kv_heads, config.head_dim, 128, config.topk_blocks)
    assert text.index_local_blocks == 1
    assert 2 * model.model.language_model.rotary_emb.inv_freq.numel() == config.head_dim // 2
    assert text.rope_parameters["rope_theta"] == 5e6


def test_norm_weights_are_used_as_one_plus_weight(model: Model) -> None:
    norm = model.model.language_model.norm
    x = torch.linspace(-2, 3, TinyConfig().hidden)
    torch.testing.assert_close(norm(x), x / x.pow(2).mean().add(1e-6).sqrt() * (1 + norm.weight))


def test_selected_blocks_are_ascending_padded_and_end_with_the_own_block(reference: OracleRun) -> None:
    assert list(reference.blocks) == SPARSE
    for layer, blocks in reference.blocks.items():
        assert blocks.shape == (TinyConfig().kv_heads, TOKENS, TinyConfig().topk_blocks) and (
            blocks.dtype == torch.int32
        )
        for row in range(0, TOKENS, 61):
            own, chosen = row // 128, blocks[:, row]
            count = min(own + 1, TinyConfig().topk_blocks)
            assert (chosen[:, :count].diff() > 0).all(), (layer, row, chosen)
            assert (chosen[:, count - 1] == own).all() and (chosen[:, 0] >= 0).all(), (layer, row, chosen)
            assert (chosen[:, count:] == -1).all(), (layer, row, chosen)


def test_selection_differs_by_head_layer_and_row(reference: OracleRun) -> None:
    """A selection taken from the wrong head, layer or row must not go unnoticed."""
    late = {layer: blocks[:, 1024:] for layer, blocks in reference.blocks.items()}
    for layer, blocks in late.items():
        assert all(not torch.equal(blocks[0], blocks[head]) for head in range(1, blocks.shape[0])), layer
        assert blocks.flatten(2).unique(dim=1).shape[1] > 20, layer
        usage = torch.stack([(blocks == block).any(-1).float().mean() for block in range(8)])
        assert usage.min() > 0.02 and usage.max() < 0.9, (layer, usage)
    assert not torch.equal(late[SPARSE[0]], late[SPARSE[1]])


@pytest.mark.parametrize("layer, row, head", [(1, 1110, 0), (2, 1024, 3), (3, 777, 1), (4, 1110, 2)])
def test_one_wrong_block_of_one_head_in_one_row_shows(
    model: Model, token_ids: list[int], reference: OracleRun, layer: int, row: int, head: int
) -> None:
    def swap(_module: object, _inputs: object, chosen: torch.Tensor) -> torch.Tensor:
        chosen, own = chosen.clone(), row // 128
        kept = chosen[0, head, row].tolist()
        other = next(block for block in range(own) if block not in kept)
        chosen[0, head, row, next(i for i, block in enumerate(kept) if block != own)] = other
        return chosen

    seen = token_ids[: row + 1]
    moved = (hooked(indexers(model)[layer], swap, model, seen) - reference.logprobs[: row + 1]).abs().amax(-1)
    assert moved[row] > 1000 * TOLERANCE, moved[row]
    assert moved[:row].max() < TOLERANCE, "rows before the changed one"


@pytest.mark.parametrize("layer", SPARSE)
@pytest.mark.parametrize("part", ["experts", "shared_experts"])
def test_experts_matter_in_every_row(
    model: Model, token_ids: list[int], reference: OracleRun, layer: int, part: str
) -> None:
    seen = token_ids[:150]
    module = getattr(model.model.language_model.layers[layer].mlp, part)
    without = hooked(module, lambda _module, _inputs, output: output * 0, model, seen)
    moved = (without - reference.logprobs[: len(seen)]).abs().amax(-1)
    assert moved.min() > 0.1, moved.min()


@pytest.mark.parametrize("layer", SPARSE)
def test_routing_bias_changes_choices_and_every_expert_is_used(
    model: Model, token_ids: list[int], layer: int
) -> None:
    routed: list[tuple[torch.Tensor, ...]] = []
    gate = model.model.language_model.layers[layer].mlp.gate
    hooked(gate, lambda _module, _inputs, output: routed.append(output), model, token_ids[:400])
    logits, _, chosen = routed[0]
    unbiased = logits.topk(TinyConfig().experts_per_token).indices
    changed = (unbiased.sort(-1).values != chosen.sort(-1).values).any(-1).float().mean()
    assert changed > 0.05, changed
    assert chosen.unique().numel() == TinyConfig().experts, chosen.unique()


def test_rounding_stays_well_below_the_tolerance(
    checkpoint: Path, model: Model, token_ids: list[int], reference: OracleRun
) -> None:
    """Against float64, and against the same weights run in chunks over a cache (other kernels)."""
    exact = run(load_oracle(checkpoint, torch.float64), token_ids)
    for layer, blocks in reference.blocks.items():
        assert torch.equal(blocks, exact.blocks[layer]), layer
    assert (reference.logprobs - exact.logprobs).abs().max() < 0.7 * TOLERANCE
    cache, parts = DynamicCache(config=model.config.text_config), []
    with torch.no_grad():
        for start in range(0, TOKENS, 200):
            chunk = torch.tensor([token_ids[start : start + 200]])
            parts.append(model(input_ids=chunk, past_key_values=cache, use_cache=True).logits[0])
    chunked = torch.cat(parts).log_softmax(-1)
    assert (reference.logprobs - chunked).abs().max() < 0.9 * TOLERANCE


def test_logits_are_spread_but_not_extreme(reference: OracleRun) -> None:
    spread = reference.logprobs.std(-1)
    assert spread.min() > 1.2 and spread.max() < 2.5, (spread.min(), spread.max())
    assert reference.logprobs.amax(-1).exp().max() < 0.9


@pytest.mark.parametrize("prompt", ["def main():", "]~!b[]~b]user\nHello[e~[\n]~b]ai\n", "日本"])
def test_greedy_text_does_not_collapse_and_holds_no_markers(
    model: Model, tokenizer: PreTrainedTokenizerBase, prompt: str
) -> None:
    start = torch.tensor([tokenizer.encode(prompt)])
    whole = model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=64, do_sample=False)
    written = whole[0, start.shape[1] :].tolist()
    assert len(written) == 64 and len(set(written)) > 32, tokenizer.decode(written)
    assert max(written) < TinyConfig().vocab - 11, "markers end or garble a demo"


@pytest.mark.parametrize("kind", ["image", "video"])
def test_media_flow_through_the_processor_and_matter(checkpoint: Path, model: Model, kind: str) -> None:
    processor = AutoProcessor.from_pretrained(checkpoint, local_files_only=True)
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3, 84, 140), dtype=np.uint8)
    outputs = []
    for medium in (pixels, 255 - pixels):
        content = torch.from_numpy(medium[0] if kind == "image" else medium)
        inputs = processor(text=f"see ]<]{kind}[>[ now", return_tensors="pt", **{f"{kind}s": [content]})
        tensors = {
            name: value for name, value in inputs.items() if name.startswith(("pixel", "image", "video"))
        }
        outputs.append(logprobs(model, inputs["input_ids"][0].tolist(), **tensors))
    frames = 1 if kind == "image" else 3
    placeholder = getattr(model.config, f"{kind}_token_id")
    assert inputs["input_ids"].eq(placeholder).sum() == frames * 3 * 5
    assert (outputs[0][-1] - outputs[1][-1]).abs().max() > 0.05


def test_selected_blocks_agree_with_a_full_run(
    model: Model, token_ids: list[int], reference: OracleRun
) -> None:
    short = selected_blocks(model, token_ids[:300])
    assert all(torch.equal(blocks, reference.blocks[layer][:, :300]) for layer, blocks in short.items())
    assert list(short) == SPARSE
