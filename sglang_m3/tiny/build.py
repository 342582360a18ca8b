"""Writes a tiny checkpoint to disk."""

from __future__ import annotations

import filecmp
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sglang_m3.quantize import quantize_checkpoint
from sglang_m3.tiny import tokenizer
from sglang_m3.tiny.config import TinyConfig, generation_config, model_config, preprocessor_configs
from sglang_m3.tiny.weights import tensor, tensor_specs


def build(
    dest: str | Path, config: TinyConfig | None = None, *, report: Callable[[str], None] = lambda line: None
) -> Path:
    """Writes the checkpoint of `config` (default: `TinyConfig()`) to the folder `dest` and returns it.

    The same config gives the same bytes, on any platform, for one Python release and one version of the
    tokenizers and safetensors packages. `dest` appears complete or not at all. A non-empty `dest` is left
    alone: returned if it already holds this very checkpoint, FileExistsError otherwise. `report` receives one
    line per step.
    """
    config = config or TinyConfig()
    dest = Path(dest).absolute()
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}-", dir=dest.parent) as scratch:
        folder = Path(scratch) / "checkpoint"
        folder.mkdir()
        _write(folder, config, report)
        if config.quantize:
            folder = quantize_checkpoint(folder, Path(scratch) / config.quantize)
            report(f"quantised to {config.quantize}")
        if dest.exists() and any(dest.iterdir()):
            different = _difference(folder, dest)
            if different:
                raise FileExistsError(
                    f"{dest} is not empty and not this checkpoint, see {different}: name another folder, or "
                    "remove it if an earlier version wrote it"
                )
            report(f"{dest} already holds this checkpoint")
            return dest
        if dest.exists():
            dest.rmdir()
        shutil.move(folder, dest)
    report(f"wrote {dest}")
    return dest


def _write(folder: Path, config: TinyConfig, report: Callable[[str], None]) -> None:
    _write_json(folder / "config.json", model_config(config))
    _write_json(folder / "generation_config.json", generation_config(config))
    for name, content in preprocessor_configs().items():
        _write_json(folder / name, content)
    report(f"tokenizer: {config.vocab} tokens")
    tokenizer.write(folder, config.vocab, config.max_position)
    count, total = _write_weights(folder, config)
    report(f"weights: {count} tensors, {total / 2**20:.1f} MiB in {config.dtype}")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(folder: Path, config: TinyConfig) -> tuple[int, int]:
    """Writes the weight files and their index; returns the number of tensors and of payload bytes."""
    shards: list[dict[str, torch.Tensor]] = []
    room, total = 0, 0
    for spec in tensor_specs(config):
        values = tensor(config, spec)
        if not shards or values.nbytes > room:
            shards.append({})
            room = config.shard_mb * 2**20
        shards[-1][spec.name] = values
        room -= values.nbytes
        total += values.nbytes
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors writes for the owner alone
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)
    return len(weight_map), total


def _difference(wanted: Path, present: Path) -> list[str]:
    """Names of the files that only one of the two folders has or whose bytes differ."""
    names = {path.name for folder in (wanted, present) for path in folder.iterdir()}
    _, mismatch, missing = filecmp.cmpfiles(wanted, present, names, shallow=False)
    return sorted(mismatch + missing)
