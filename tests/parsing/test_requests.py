"""Requests are held to M3's contract for every M3, and for nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_m3.parsing import requests


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("MiniMaxM3SparseForConditionalGeneration", True),
        ("MiniMaxM3SparseForCausalLM", True),
        ("MiniMaxM2ForCausalLM", False),
        ("LlamaForCausalLM", False),
    ],
)
def test_the_architecture_decides(architecture, expected):
    config = SimpleNamespace(architectures=[architecture], model_type="minimax_m2")
    manager = SimpleNamespace(model_config=SimpleNamespace(hf_config=config))
    serving = SimpleNamespace(tokenizer_manager=manager, is_minimax_m3=False)
    requests.after_serving_chat_init(None, serving, manager, None)
    assert serving.is_minimax_m3 == expected


def test_other_models_keep_what_the_responses_endpoint_makes_of_their_turns():
    turns = [
        {"role": "assistant", "content": "a", "phase": "commentary"},
        {"role": "assistant", "content": "b"},
    ]
    serving = SimpleNamespace(is_minimax_m3=False)
    assert requests.after_construct_input_messages(turns, serving, None) is turns


@pytest.mark.parametrize(
    ("is_m3", "reads", "expected"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_thinking_is_the_templates_business_where_it_reads_it(is_m3, reads, expected):
    serving = SimpleNamespace(is_minimax_m3=is_m3, _template_reads_reasoning_content=reads)
    assert requests.after_supports_native_reasoning_history(False, serving) == expected
