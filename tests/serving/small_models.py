"""Small models of other architectures, with random weights and without a tokenizer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from launch.server import running
from tests.serving.client import Server

_COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    # SGLang's and transformers' defaults differ; a token that never comes suits both.
    "bos_token_id": 510,
    "eos_token_id": 511,
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_COMMON),
    "qwen3-moe": Qwen3MoeConfig(
        **_COMMON, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True
    ),
}
"""Grouped-query attention and untied embeddings; Qwen's also normalises queries and keys and has experts."""


def build(name: str, directory: Path) -> PreTrainedModel:
    """Write a float32 checkpoint of `CONFIGS[name]` and return the model, in evaluation mode.

    The weights are wide enough for logits that differ by several units, so that a wrong attention or expert
    moves log-probabilities far beyond rounding.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    return model


@contextlib.contextmanager
def server(checkpoint: Path, scratch: Path, *flags: str) -> Iterator[Server]:
    """Stock `sglang.launch_server` in float32, with whatever plugins are installed."""
    command = (sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint))
    given = ("--dtype", "float32", "--skip-tokenizer-init", "--max-total-tokens", "4096", "--sleep-on-idle")
    environ = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with running((*command, *given, *flags), scratch / "server.log", environ, quiet=True) as url:
        yield Server(url, scratch)
