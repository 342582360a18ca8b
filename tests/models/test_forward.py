"""The forward pass by itself, with attention in a few lines of PyTorch, against transformers' model."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.layers.moe import fused_moe_native
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import Tensor
from torch.nn import functional

from sglang_m3 import hardware
from sglang_m3.models.minimax_m3 import MiniMaxM3SparseForConditionalGeneration
from sglang_m3.platforms import cpu_experts
from sglang_m3.tiny import TinyConfig
from sglang_m3.tiny import build as build_checkpoint
from tests import oracle
from tests.models.building import as_rank, build, tensors

TOKENS = 201
"""Of one prompt: two blocks, so every row attends to all that it sees, whatever the index branch says."""

Model = MiniMaxM3SparseForConditionalGeneration


class WholePrompt:
    """Attention of one prompt to itself, in place of SGLang's backends and caches."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool, **index: Tensor
    ) -> Any:
        heads = [part.view(TOKENS, -1, layer.head_dim).transpose(0, 1) for part in (q, k, v)]
        out = functional.scaled_dot_product_attention(
            *heads, is_causal=True, scale=layer.scaling, enable_gqa=True
        )
        out = out.transpose(0, 1).flatten(1)
        return (None, out) if index else out


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("forward") / "tiny", TinyConfig(layers=6, vocab=512))


@pytest.fixture(scope="module")
def transformers(checkpoint: Path) -> oracle.Model:
    return oracle.load_oracle(checkpoint)


@pytest.fixture
def model(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Model]:
    """In float32, or in the dtype that a test asks for."""
    if hardware.target() != "cpu":
        pytest.skip("layers are built for the CPU")
    dtype = getattr(request, "param", torch.float32)
    # The plugin's hook on SGLang's native experts, which a process without plugins does not have.
    experts = functools.partial(cpu_experts.around_moe_forward_native, fused_moe_native.moe_forward_native)
    monkeypatch.setattr(fused_moe_native, "moe_forward_native", experts)
    with as_rank(checkpoint, dtype=str(dtype).removeprefix("torch.")) as config:
        model = build(config, dtype)
        model.load_weights(tensors(checkpoint))
        yield model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(500, (TOKENS,), generator=torch.Generator().manual_seed(4))


def forward(model: Model, ids: Tensor, embeddings: Tensor | None = None) -> Any:
    """SGLang's logits output for the last token of a prompt, with the hidden states it captured."""
    positions = torch.arange(TOKENS)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=ids,
        req_pool_indices=torch.ones(1, dtype=torch.long),
        seq_lens=torch.tensor([TOKENS]),
        out_cache_loc=positions,
        seq_lens_sum=TOKENS,
        positions=positions,
        extend_seq_lens=torch.tensor([TOKENS]),
        extend_seq_lens_cpu=[TOKENS],
        extend_prefix_lens_cpu=[0],
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    context = forward_context(ForwardContext(attn_backend=WholePrompt()), forward_batch=batch)
    with context, torch.compiler.set_stance("force_eager"), torch.no_grad():
        return model(ids, positions, batch, input_embeds=embeddings)


def test_logits_equal_transformers(model: Model, transformers: oracle.Model, ids: Tensor) -> None:
    want = oracle.run(transformers, ids.tolist()).logprobs[-1]
    got = forward(model, ids).next_token_logits[0].log_softmax(-1)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_the_tokens_own_embeddings_give_the_same_bits(model: Model, ids: Tensor) -> None:
    embeddings = model.get_input_embeddings()(ids)
    by_ids, by_embeddings = forward(model, ids), forward(model, torch.zeros_like(ids), embeddings)
    assert torch.equal(by_ids.next_token_logits, by_embeddings.next_token_logits)


@pytest.mark.parametrize("given", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("model", [torch.bfloat16], indirect=True, ids=str)
@torch.no_grad()
def test_embeddings_that_no_token_has_give_the_oracles_distribution_in_bfloat16(
    model: Model, transformers: oracle.Model, ids: Tensor, given: torch.dtype
) -> None:
    table = transformers.get_input_embeddings().weight
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    # Each the mean of two tokens', in bfloat16's numbers whatever dtype they come in.
    embeddings = ((table[ids] + table[ids.flip(0)]) / 2).bfloat16().to(given)
    want, of_tokens = (
        transformers(inputs_embeds=rows[None].float(), input_ids=None, use_cache=False)
        .logits[0, -1]
        .log_softmax(-1)
        for rows in (embeddings, table[ids])
    )
    got = forward(model, torch.zeros_like(ids), embeddings).next_token_logits[0].float().log_softmax(-1)
    divergence, apart = ((want.exp() * (want - other)).sum() for other in (got, of_tokens))
    print(f"KL in nats: {divergence:.5f}; of the tokens' own embeddings {apart:.3f}")
    assert divergence < 0.005 and apart > 0.1


@pytest.mark.parametrize("layers", ([0], [2, 1, 4], [3, 5], None), ids=str)
def test_captured_states_are_the_outputs_of_the_chosen_layers(
    model: Model, transformers: oracle.Model, ids: Tensor, layers: list[int] | None
) -> None:
    outputs: dict[int, Tensor] = {}

    def keep(number: int) -> Any:
        def hook(_module: object, _inputs: object, output: Any) -> None:
            outputs[number] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    decoder = transformers.model.language_model.layers
    handles = [layer.register_forward_hook(keep(number)) for number, layer in enumerate(decoder)]
    want = oracle.run(transformers, ids.tolist())
    for handle in handles:
        handle.remove()
    model.set_eagle3_layers_to_capture(layers)
    got = forward(model, ids)
    # In the order of the layers, whatever order was asked for; by default the ones EAGLE3 is trained with.
    chosen = sorted(layers) if layers is not None else [2, 3, 3]
    states = torch.cat([outputs[layer] for layer in dict.fromkeys(chosen)], -1)
    torch.testing.assert_close(got.hidden_states, states, rtol=0, atol=3e-5)
    logprobs = got.next_token_logits[0].log_softmax(-1)
    torch.testing.assert_close(logprobs, want.logprobs[-1], rtol=0, atol=1e-5)


def test_a_layer_that_is_not_there_cannot_be_captured(model: Model) -> None:
    with pytest.raises(AssertionError, match=r"layers \[6\] of 6"):
        model.set_eagle3_layers_to_capture([6])
