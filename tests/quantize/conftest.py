from __future__ import annotations

from pathlib import Path

import pytest

from sglang_m3.quantize import quantize_checkpoint
from sglang_m3.tiny import TinyConfig, build

SMALL = TinyConfig(
    layers=3,
    hidden=96,
    heads=6,
    kv_heads=2,
    dense_intermediate=160,
    expert_intermediate=64,
    experts=3,
    vocab=512,
    vision_layers=1,
    shard_mb=1,
)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build(tmp_path_factory.mktemp("plain") / "c", SMALL)
    assert len(list(folder.glob("*.safetensors"))) >= 2
    return folder


@pytest.fixture(scope="session")
def converted(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize_checkpoint(plain, tmp_path_factory.mktemp("converted") / "c")
