"""`--json-model-override-args`: merged into the nested configuration, each name checked at its level."""

from __future__ import annotations

import contextvars
import copy
import difflib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sglang_m3 import hardware
from sglang_m3.architectures import M3_ARCHITECTURES
from sglang_m3.config.fields import ConfigError, describe
from sglang_m3.config.m3 import M3Config, as_mapping

_FLAG = "--json-model-override-args"

_QUANTIZATION: contextvars.ContextVar[str | None] = contextvars.ContextVar("--quantization", default=None)
"""The flag, while SGLang makes a model's configuration."""

_NAMES: dict[str, list[str]] = json.loads(Path(__file__).with_name("names.json").read_text())
"""Names of MiniMax-M3's fields by the object that they belong to, SGLang's and transformers' alike."""

_ANY: dict[str, Any] = {}
"""The names of an object whose fields are others' business."""


def _tree(part: str, **objects: dict[str, Any]) -> dict[str, Any]:
    plain = dict.fromkeys(_NAMES["everywhere"] + _NAMES[part])
    return {**plain, "quantization_config": _ANY, **objects}


_ROPE = dict.fromkeys(_NAMES["rope"])
_TEXT_TREE = _tree(
    "text_config",
    sparse_attention_config=dict.fromkeys(_NAMES["sparse_attention_config"]),
    rope_scaling=_ROPE,
    rope_parameters=_ROPE,
)
_VISION_TREE = _tree("vision_config", rope_parameters=_ANY, img_token_compression_config=_ANY)
_NESTED_TREE = _tree(
    "top", text_config=_TEXT_TREE, vision_config=_VISION_TREE, img_token_compression_config=_ANY
)
_FLAT_TREE = _TEXT_TREE | _tree("top")
"""Name -> None for a plain value, or the names of an object."""


def merge(config: Mapping[str, Any], overrides: Any) -> dict[str, Any]:
    """`config` with `overrides` laid over it, object by object; lists and plain values are replaced.

    Raises:
        ConfigError: a name that the configuration does not have and M3 does not know at that level; the error
            says at which level it does belong, or which name is alike.
    """
    if not isinstance(overrides, Mapping):
        raise ConfigError(_FLAG, f"must be an object, not {describe(overrides)}")
    tree = _NESTED_TREE if config.get("text_config") is not None else _FLAT_TREE
    return _merge(config, overrides, tree, "", tree)


def _merge(
    config: Mapping[str, Any],
    overrides: Mapping[str, Any],
    names: dict[str, Any],
    path: str,
    tree: dict[str, Any],
) -> dict[str, Any]:
    merged = dict(config)
    for name, value in overrides.items():
        where = f"{path}.{name}" if path else name
        if names is not _ANY and name not in names and name not in config:
            raise ConfigError(where, _unknown(name, value, names, path, tree))
        current = as_mapping(config.get(name))
        inner = names.get(name)
        if isinstance(current, Mapping) or inner is not None:
            if value is None:
                merged[name] = None
                continue
            if not isinstance(value, Mapping):
                raise ConfigError(where, f"is an object; {_FLAG} gives {describe(value)}")
            merged[name] = _merge(current or {}, value, _ANY if inner is None else inner, where, tree)
        elif isinstance(value, Mapping) and name in names:
            raise ConfigError(where, f"is a plain value; {_FLAG} gives {describe(value)}")
        else:
            merged[name] = value
    return merged


def _unknown(name: str, value: Any, names: dict[str, Any], path: str, tree: dict[str, Any]) -> str:
    for place in _places(name, tree):
        example: Any = {name: value}
        for part in reversed(place):
            example = {part: example}
        here, there = path or "the top level", ".".join(place) or "the top level"
        return f"is not a field of {here} but of {there}: pass {_FLAG} '{json.dumps(example)}'"
    alike = difflib.get_close_matches(name, sorted(_all_names(tree)), n=1)
    hint = f"; did you mean {alike[0]}?" if alike else ""
    return f"in {_FLAG} is not a field of MiniMax-M3's configuration{hint}"


def _places(name: str, tree: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Where a name is known, the text part before the vision part."""
    found = [path] if name in tree else []
    for part, inner in tree.items():
        found += _places(name, inner, (*path, part)) if inner else []
    return found


def _all_names(tree: dict[str, Any]) -> set[str]:
    return set(tree).union(*(_all_names(inner) for inner in tree.values() if inner))


def around_model_config(original: Callable[..., None], config: Any, *args: Any, **kwargs: Any) -> None:
    """Around `ModelConfig.__init__`, which does not tell `get_config` what `--quantization` is."""
    token = _QUANTIZATION.set(kwargs.get("quantization"))
    try:
        original(config, *args, **kwargs)
    finally:
        _QUANTIZATION.reset(token)


def around_get_config(
    original: Callable[..., Any],
    model: str,
    trust_remote_code: bool,
    revision: str | None = None,
    model_override_args: dict[str, Any] | None = None,
    model_config_parser: str = "auto",
    **kwargs: Any,
) -> Any:
    """Around SGLang's reading of a config.json: for M3, overrides are merged, and every field is spelled out.

    SGLang would replace a nested object by the override, and applies no defaults to fields that are missing.

    Raises:
        ConfigError: see `merge` and `M3Config.read`.
    """
    parser = {"model_config_parser": model_config_parser, **kwargs}
    config = original(model, trust_remote_code, revision, None, **parser)
    if not _is_ours(config):
        if not model_override_args:
            return config
        return original(model, trust_remote_code, revision, model_override_args, **parser)
    config = copy.deepcopy(config)
    merged = merge(as_mapping(config), model_override_args or {})
    fields = M3Config.read(merged).text_fields()
    if merged.get("text_config") is None:
        merged |= fields
    else:
        merged["text_config"] = {**as_mapping(merged["text_config"]), **fields}
    _assign(config, merged, {*(model_override_args or {}), *fields, "text_config"})
    return config


def _is_ours(config: Any) -> bool:
    from sglang.srt.arg_groups.model_overrides.minimax_m3 import _resolve_quant_method

    from sglang_m3.overrides import SERVED_BY_SGLANG

    target = hardware.target()
    if target is None or not set(getattr(config, "architectures", None) or ()) & set(M3_ARCHITECTURES):
        return False
    quantization = _QUANTIZATION.get() or _resolve_quant_method(config)
    return target != "sm90" or quantization not in SERVED_BY_SGLANG


def _assign(config: Any, values: Mapping[str, Any], names: set[str]) -> None:
    for name in sorted(names & values.keys()):
        current = getattr(config, name, None)
        if hasattr(current, "to_dict"):
            current.update(values[name])
        else:
            setattr(config, name, values[name])
