"""Put the plugin's model classes where SGLang looks a model's class up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_m3.architectures import M3_ARCHITECTURES


def around_get_model_architecture(
    original: Callable[..., tuple[type, str]], model_config: Any
) -> tuple[type, str]:
    """Around `get_model_architecture`: M3 that the plugin serves gets the plugin's class.

    SGLang's registry knows names only, and upstream's class stays right for quantisations that are left to
    SGLang and for servers of the vision half alone.
    """
    from sglang_m3.attention.parameters import serves

    model_class, architecture = original(model_config)
    if (
        architecture not in M3_ARCHITECTURES
        or not serves(model_config)
        or model_config.hf_config.encoder_only
    ):
        return model_class, architecture
    from sglang_m3.models import minimax_m3

    return getattr(minimax_m3, architecture), architecture
