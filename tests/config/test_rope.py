"""Rotary embedding beyond the original context: as transformers computes it, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.layers.rotary_embedding import get_rope
from transformers import MiniMaxM3VLConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLRotaryEmbedding

from sglang_m3.config import ConfigError, M3Config
from tests.config.test_m3_config import nested

ORIGINAL = 32_768
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": ORIGINAL}


def with_scaling(name: str = "rope_scaling", longest: int = 2 * ORIGINAL, **scaling: Any) -> dict[str, Any]:
    return nested(max_position_embeddings=longest, **{name: YARN | scaling})


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "scaling",
    [
        {},
        {"factor": 3.7},
        {"factor": 1.0},
        {"attention_factor": 1.25},
        {"beta_fast": 24, "beta_slow": 2},
        {"mscale": 1.0, "mscale_all_dim": 0.7},
        {"truncate": False},
        {"attention_factor": 0.9, "mscale": 1.0, "mscale_all_dim": 0.7},
        {"original_max_position_embeddings": None},
    ],
    ids=str,
)
def test_cosines_and_sines_beyond_the_original_context_are_transformers(
    name: str, scaling: dict[str, Any]
) -> None:
    config = with_scaling(name, longest=ORIGINAL, **scaling)
    read = M3Config.read(config)
    longest = read.max_position_embeddings
    positions = torch.tensor([0, 1, 127, ORIGINAL - 1, min(ORIGINAL, longest - 1), longest - 1])

    given = {key: value for key, value in config["text_config"][name].items() if value is not None}
    theirs = MiniMaxM3VLConfig(**nested(max_position_embeddings=ORIGINAL, **{name: given}))
    cos, sin = MiniMaxM3VLRotaryEmbedding(theirs.text_config)(torch.zeros(1), positions[None])

    half = read.rope.rotary_dim // 2
    table = get_rope(
        read.head_dim,
        rotary_dim=read.rope.rotary_dim,
        max_position=longest,
        base=read.rope.theta,
        rope_scaling=read.rope.sglang_parameters(read.head_dim),
        dtype=torch.float32,
    ).cos_sin_cache[positions]
    torch.testing.assert_close(table, torch.cat((cos[0, :, :half], sin[0, :, :half]), -1), rtol=0, atol=3e-7)


def test_a_scaled_context_reaches_as_far_as_the_scaling() -> None:
    assert M3Config.read(with_scaling(longest=2 * ORIGINAL)).max_position_embeddings == 2 * ORIGINAL
    assert M3Config.read(with_scaling(longest=ORIGINAL)).max_position_embeddings == 2 * ORIGINAL
    released = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 524_288}
    read = M3Config.read(nested(max_position_embeddings=524_288, rope_scaling=released))
    assert read.max_position_embeddings == 1_048_576


def test_rope_scaling_completes_rope_parameters() -> None:
    parameters = {"rope_type": "default", "rope_theta": 5e6}
    read = M3Config.read(with_scaling(longest=ORIGINAL))
    both = nested(max_position_embeddings=ORIGINAL, rope_parameters=parameters, rope_scaling=YARN)
    assert M3Config.read(both) == read


@pytest.mark.parametrize("kind", ["linear", "dynamic", "longrope", "llama3", "deepseek_yarn", "mrope"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_other_scalings_are_refused_by_name(kind: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"rope_type is '{kind}'"):
        M3Config.read(nested(rope_scaling={key: kind, "factor": 2.0}))


@pytest.mark.parametrize(
    ("scaling", "field", "message"),
    [
        ({"factor": 0.5}, "factor", "must be 1 at least"),
        ({"factor": "2"}, "factor", "must be a number"),
        ({"factor": 1e6}, "factor", "too many"),
        ({"longest": 3 * ORIGINAL}, "max_position_embeddings", "is 98304, but YaRN reaches 65536"),
        ({"beta_fast": 1, "beta_slow": 2}, "beta_fast", "beta_slow"),
        ({"mscale": 1.0}, "mscale", "set alone"),
        ({"mrope_section": [1, 2, 3]}, "mrope_section", "is not known"),
        ({"rope_theta": 1e4}, "rope_theta", "is 10000.0, but text_config.rope_theta is 5000000.0"),
        ({"truncate": "no"}, "truncate", "must be true or false"),
        ({"rope_type": "default"}, "factor", "rope_type is 'default'"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor", "is 0.25, but"),
    ],
    ids=str,
)
def test_parameters_that_contradict_are_refused(scaling: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        M3Config.read(with_scaling(**scaling))
    assert caught.value.field.split(".")[-1] == field
