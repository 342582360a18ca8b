"""Small checkpoints of a test's own, and what checkpoints hold."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LAYER = "language_model.model.layers.1"
Q_PROJ = f"{LAYER}.self_attn.q_proj.weight"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def file_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def mini(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    """A checkpoint of one weight file, without an index."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    whole = {"architectures": ["MiniMaxM3SparseForCausalLM"], **config}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder
