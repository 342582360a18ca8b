"""Rotary embedding: base, rotated channels, and YaRN as transformers computes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sglang_m3.config.fields import Fields

_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_YARN = (
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "attn_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's parameters, defaults filled in (transformers, `modeling_rope_utils._compute_yarn_parameters`).

    Attributes:
        factor: how many times longer the context is than the original one.
        original_tokens: context of the pretraining.
        attention_factor: what cosines and sines are multiplied by.
        beta_fast, beta_slow: rotations over the original context at which the ramp begins and ends.
        truncate: whether the ramp's ends are rounded to whole channels.
    """

    factor: float
    original_tokens: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool

    def sglang_parameters(self) -> dict[str, Any]:
        """The same in the names of SGLang's `get_rope`, which multiplies its own factor by `attn_factor`."""
        parameters: dict[str, Any] = {
            "factor": self.factor,
            "original_max_position_embeddings": self.original_tokens,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "truncate": self.truncate,
        }
        own = _magnitude(self.factor)
        if self.attention_factor != own:
            parameters["attn_factor"] = self.attention_factor / own
        return parameters


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first `rotary_dim` of a head's channels, as two halves.

    Attributes:
        theta: base of the frequencies.
        rotary_dim: channels that rotate, even.
        scaling: None for none.
    """

    theta: float
    rotary_dim: int
    scaling: YarnScaling | None

    def sglang_parameters(self, head_dim: int) -> dict[str, Any]:
        """`rope_parameters` that SGLang and transformers read alike."""
        return {
            "rope_theta": self.theta,
            "partial_rotary_factor": self.rotary_dim / head_dim,
            "rope_type": "default" if self.scaling is None else "yarn",
            **({} if self.scaling is None else self.scaling.sglang_parameters()),
        }


def read_rope(text: Fields, head_dim: int) -> Rope:
    """Read `rope_theta`, `rotary_dim`, `partial_rotary_factor`, and `rope_scaling` or `rope_parameters`.

    Where both of the last are there, `rope_scaling` is laid over `rope_parameters`: an override that only
    knows the older name completes what the checkpoint says in the newer one.

    Raises:
        ConfigError: a scaling other than YaRN, a parameter that is not known, or a contradiction.
    """
    merged: dict[str, Any] = {}
    name = "rope_parameters"
    for source in ("rope_parameters", "rope_scaling"):
        if source in text:
            given = text.object(source)
            _check_names(given)
            merged |= {field: given[field] for field in given.names()}
            merged |= _rope_type(given)
            name = source
    rope = Fields(merged, text.path(name))
    kind = merged.get("rope_type", "default")
    if kind not in ("default", "yarn"):
        raise rope.error("rope_type", f"is {kind!r}; sglang-m3 serves 'default' and 'yarn' only")
    if kind == "default" and (unused := sorted(merged.keys() & set(_YARN))):
        raise rope.error(unused[0], "is set, but rope_type is 'default', which does not scale; set 'yarn'")
    rotary_dim = _rotary_dim(text, rope, head_dim)
    theta = _agreeing(text, rope, "rope_theta", 1.0)
    if theta is None:
        raise text.error("rope_theta", "is missing, there and in rope_parameters")
    return Rope(theta, rotary_dim, None if kind == "default" else _read_yarn(rope, text))


def _check_names(given: Fields) -> None:
    unknown = sorted(set(given.names()) - {*_COMMON, *_YARN})
    if unknown:
        raise given.error(str(unknown[0]), "is not known; sglang-m3 serves plain and YaRN rotary embedding")


def _rope_type(given: Fields) -> dict[str, str]:
    kind = given.string("rope_type", None) or given.string("type", None)
    return {} if kind is None else {"rope_type": kind}


def _rotary_dim(text: Fields, rope: Fields, head_dim: int) -> int:
    factor = _agreeing(text, rope, "partial_rotary_factor", 0.0)
    rotary_dim = text.integer("rotary_dim", None)
    if factor is None and rotary_dim is None:
        raise text.error(
            "rotary_dim", "is missing, and so is partial_rotary_factor, there and in rope_parameters"
        )
    if factor is not None and factor > 1:
        raise text.error("partial_rotary_factor", f"is {factor}; it must be 1 at most")
    if rotary_dim is None:
        rotary_dim = int(head_dim * factor)
    elif factor is not None and rotary_dim != int(head_dim * factor):
        raise text.error(
            "rotary_dim",
            f"is {rotary_dim}, but partial_rotary_factor ({factor}) of head_dim ({head_dim}) is not",
        )
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise text.error(
            "rotary_dim",
            f"is {rotary_dim}; it must be even and head_dim ({head_dim}) at most "
            f"(partial_rotary_factor is {factor})",
        )
    return rotary_dim


def _agreeing(text: Fields, rope: Fields, name: str, minimum: float) -> float | None:
    outer, inner = text.number(name, None, minimum=minimum), rope.number(name, None, minimum=minimum)
    if outer is not None and inner is not None and outer != inner:
        raise rope.error(name, f"is {inner}, but {text.path(name)} is {outer}")
    return outer if inner is None else inner


def _read_yarn(rope: Fields, text: Fields) -> YarnScaling:
    longest = text.integer("max_position_embeddings")
    original = rope.integer("original_max_position_embeddings", longest)
    factor = rope.number("factor", max(1.0, longest / original))
    if factor < 1:
        raise rope.error("factor", f"is {factor}; it must be 1 at least")
    beta_fast, beta_slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise rope.error("beta_fast", f"is {beta_fast}; it must be beta_slow ({beta_slow}) at least")
    if original * factor > 2**31 - 1:
        raise rope.error("factor", f"is {factor}: {original} * {factor} tokens are too many")
    return YarnScaling(
        factor,
        original,
        _attention_factor(rope, factor),
        beta_fast,
        beta_slow,
        rope.boolean("truncate", True),
    )


def _attention_factor(rope: Fields, factor: float) -> float:
    """What is given, else by the two magnitude scales, else by the factor alone."""
    given = rope.number("attention_factor", None)
    # SGLang's name for a multiple of what follows from the factor; it is what `sglang_parameters` writes.
    multiple = rope.number("attn_factor", None)
    scale, scale_all = rope.number("mscale", None), rope.number("mscale_all_dim", None)
    if given is not None and multiple is not None:
        raise rope.error("attn_factor", f"is {multiple}, but attention_factor is {given}; set one of them")
    if given is not None:
        return given
    if scale is not None and scale_all is not None:
        base = _magnitude(factor, scale) / _magnitude(factor, scale_all)
    elif scale is None and scale_all is None:
        base = _magnitude(factor)
    else:
        lone = "mscale" if scale is not None else "mscale_all_dim"
        raise rope.error(lone, "is set alone; set both of mscale and mscale_all_dim, or neither")
    return base if multiple is None else base * multiple


def _magnitude(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
