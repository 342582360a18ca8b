"""Which model class SGLang gets: the plugin's for what the plugin serves, and whatever it had otherwise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_m3.architectures import M3_ARCHITECTURES
from sglang_m3.models import minimax_m3
from sglang_m3.models.register import around_get_model_architecture


class Upstream:
    """What SGLang found."""


def chosen(architecture: str, *, quantization: str | None = None, encoder_only: bool = False) -> type:
    hf_config = SimpleNamespace(architectures=[architecture], encoder_only=encoder_only)
    model_config = SimpleNamespace(hf_config=hf_config, quantization=quantization)
    found, name = around_get_model_architecture(lambda _: (Upstream, architecture), model_config)
    assert name == architecture
    return found


@pytest.mark.parametrize("quantization", (None, "m3_mxfp8"))
@pytest.mark.parametrize("architecture", M3_ARCHITECTURES)
def test_m3_that_the_plugin_serves_gets_its_class(architecture: str, quantization: str | None) -> None:
    assert chosen(architecture, quantization=quantization) is getattr(minimax_m3, architecture)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        (M3_ARCHITECTURES[1], {"quantization": "minimax_m3_nvfp4"}),
        (M3_ARCHITECTURES[0], {"quantization": "modelopt_mixed"}),
        (M3_ARCHITECTURES[1], {"encoder_only": True}),
        ("LlamaForCausalLM", {}),
        ("MiniMaxM2ForCausalLM", {}),
    ],
    ids=str,
)
def test_everything_else_is_left_alone(architecture: str, options: dict) -> None:
    assert chosen(architecture, **options) is Upstream
