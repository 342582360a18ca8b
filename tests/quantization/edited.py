"""Checkpoints with something wrong, or something else, in them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from m3_kernels import dequantize_mxfp8
from safetensors.torch import load_file, save_file
from torch import Tensor

Edit = Callable[[dict[str, Tensor]], None]


def edited(source: Path, dest: Path, edit: Edit, *, declared: bool = True) -> Path:
    """A copy of `source` in one weight file whose tensors `edit` has changed in place.

    Args:
        declared: False drops `quantization_config` from config.json.
    """
    shutil.copytree(source, dest, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    tensors = {
        name: value for file in source.glob("*.safetensors") for name, value in load_file(file).items()
    }
    edit(tensors)
    save_file(
        {name: value.contiguous() for name, value in tensors.items()},
        dest / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads((dest / "config.json").read_text())
    if not declared:
        del config["quantization_config"]
    (dest / "config.json").write_text(json.dumps(config))
    return dest


def dequantise(tensors: dict[str, Tensor]) -> None:
    """An edit: every quantised weight becomes the float32 numbers that it stands for."""
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        tensors[weight] = dequantize_mxfp8(tensors[weight], tensors.pop(name), torch.float32)
