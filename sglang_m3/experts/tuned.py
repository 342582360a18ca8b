"""Hand SGLang's Triton experts a tuned configuration for M3's shapes where it has none of its own.

SGLang divides the work of its fused experts as a file says, by the number of experts, their width and the
GPU, and has no such file for M3's expert-parallel shapes. Ours, in its own format under `configs/`, were
written by `python -m bench_serving.tune_experts`.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_m3.architectures import M3_ARCHITECTURES

logger = logging.getLogger(__name__)

CONFIGS = Path(__file__).parent / "configs"
DIRECTORY_VARIABLE = "SGLANG_MOE_CONFIG_DIR"
"""SGLang's own variable for another directory of such files; where it is set the plugin adds nothing."""

Configuration = dict[int, dict[str, Any]]
"""Tokens of a step -> how its work is divided; SGLang takes the nearest."""

_serving_m3 = False


def after_get_model_architecture(found: tuple[type, str], *_: Any) -> None:
    """After `get_model_architecture`: whether the model of this process is the plugin's.

    SGLang looks its configurations up by shape alone, which another model may have, too.
    """
    global _serving_m3
    model_class, architecture = found
    _serving_m3 = architecture in M3_ARCHITECTURES and model_class.__module__.startswith("sglang_m3.")


def around_get_moe_configs(
    original: Callable[..., Configuration | None],
    E: int,
    N: int,
    dtype: str | None,
    block_n: int | None = 0,
    block_k: int | None = 0,
    per_channel_quant: bool = False,
    down_moe: bool = False,
) -> Configuration | None:
    """Around `get_moe_configs`: the shipped configuration for M3 with unquantised weights."""
    if _serving_m3 and dtype is None and DIRECTORY_VARIABLE not in os.environ:
        configuration = shipped(E, N, down_moe)
        if configuration is not None:
            return configuration
    return original(E, N, dtype, block_n, block_k, per_channel_quant, down_moe=down_moe)


@functools.cache
def shipped(experts: int, width: int, down: bool) -> Configuration | None:
    """The configuration that comes with the plugin for this GPU; None if there is none, or SGLang has one.

    Of this version of Triton, or else the newest, as SGLang chooses among its own. `down` names the second
    product's file. Says once which file it is.
    """
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config as lookup

    first = lookup.get_config_file_name(experts, width, None)
    if _versions(Path(lookup.__file__).resolve().parent / "configs", first):
        return None
    found = _versions(CONFIGS, lookup.get_config_file_name(experts, width, None, down_moe=down))
    if not found:
        return None
    file = found.get(lookup.triton.__version__) or found[max(found, key=_ordered)]
    if not down:
        logger.info("sglang-m3: SGLang has no configuration of its experts for this shape; it gets %s", file)
    return {int(tokens): entry for tokens, entry in json.loads(file.read_text()).items()}


def known_by(experts: int, width: int, gpu: str) -> str | None:
    """Who has a configuration for the first product on a GPU of this name: `SGLang`, `sglang-m3`, or None."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config as lookup

    name = f"E={experts},N={width},device_name={gpu.replace(' ', '_')}.json"
    if _versions(Path(lookup.__file__).resolve().parent / "configs", name):
        return "SGLang"
    return "sglang-m3" if _versions(CONFIGS, name) else None


def _versions(root: Path, name: str) -> dict[str, Path]:
    """Triton version -> the file for it."""
    return {
        folder.name.removeprefix("triton_").replace("_", "."): folder / name
        for folder in root.glob("triton_*")
        if (folder / name).exists()
    }


def _ordered(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


HOOKS = (
    (
        "sglang.srt.model_loader.utils.get_model_architecture",
        after_get_model_architecture,
        HookType.AFTER,
    ),
    (
        "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config.get_moe_configs",
        around_get_moe_configs,
        HookType.AROUND,
    ),
)
