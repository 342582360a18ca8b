"""While weights load, the host holds one file of the checkpoint at most, whatever the number of files.

Files are mapped, not read, so what is held is page cache that the kernel may take back. SGLang's loader has
nine files open at a time by default. Of memory that cannot be taken back, none is needed.
"""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_loader.loader import DefaultModelLoader
from torch import Tensor

from sglang_m3 import hardware
from sglang_m3.config import M3Config
from sglang_m3.models.weight_map import checkpoint_weights
from sglang_m3.tiny.config import TinyConfig, model_config
from tests.models.building import as_rank, build

SHARDS = 21
OPEN = 9
"""Files that SGLang's default loader has open: eight threads', and the one that is next."""

CONFIG = TinyConfig(
    layers=SHARDS, hidden=512, experts=8, expert_intermediate=128, dense_intermediate=1024, vocab=512
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer to a file, zeros everywhere."""
    folder = tmp_path_factory.mktemp("shards")
    config = model_config(CONFIG)
    (folder / "config.json").write_text(json.dumps(config))
    shards: dict[str, dict[str, Tensor]] = {}
    for name, to in checkpoint_weights(M3Config.read(config)).items():
        layer = int(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else 0
        file = f"model-{layer:05}-of-{SHARDS:05}.safetensors"
        shards.setdefault(file, {})[name] = torch.zeros(to.shape, dtype=torch.bfloat16)
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def in_use() -> tuple[int, int]:
    """Bytes of this process's memory: its own, and mapped from files."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    own, mapped = (int(status[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
    return own, mapped


def peak(checkpoint: Path, options: dict[str, Any], keep: Callable[[Tensor], object]) -> tuple[int, int]:
    """The most bytes of both kinds beyond those before SGLang's loader, with `options`, begins.

    `keep` sees every tensor.
    """
    most = [0, 0]

    def watched(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            keep(tensor)
            yield name, tensor
            # By now the tensor has been copied.
            most[:] = map(max, most, in_use())

    loader = DefaultModelLoader(LoadConfig(model_loader_extra_config=options))
    with as_rank(checkpoint, dtype="bfloat16") as config:
        model = build(config, torch.bfloat16)
        # What earlier tests left to Python and to malloc would be used again, and hide what is allocated.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = in_use()
        source = DefaultModelLoader.Source(str(checkpoint), None, fall_back_to_pt=False)
        model.load_weights(watched(loader._get_weights_iterator(source)))
        unused = set(model.unloaded_parameters)
        assert not any(value.any() for name, value in model.named_parameters() if name not in unused)
    return most[0] - before[0], most[1] - before[1]


@pytest.mark.parametrize(
    ("options", "files"), [({"enable_multithread_load": False}, 1), ({}, OPEN)], ids=["one by one", "default"]
)
def test_peak_memory_is_the_open_files_and_nothing_else(
    checkpoint: Path, options: dict[str, Any], files: int, capsys: pytest.CaptureFixture[str]
) -> None:
    if hardware.target() != "cpu":
        pytest.skip("layers are built for the CPU")
    largest = max(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    own, mapped = peak(checkpoint, options, lambda tensor: None)
    assert f"{SHARDS}/{SHARDS}" in capsys.readouterr().err, "progress is shown, file by file"
    print(f"files of {largest / 2**20:.1f} MiB: {own / 2**20:.1f} own, {mapped / 2**20:.1f} mapped")
    assert own < largest
    assert mapped < (files + 1) * largest < 0.5 * SHARDS * largest


@pytest.mark.parametrize(("copied", "kind"), [(False, 1), (True, 0)], ids=["mapped", "own"])
def test_a_loader_that_holds_everything_would_be_seen(checkpoint: Path, copied: bool, kind: int) -> None:
    if hardware.target() != "cpu":
        pytest.skip("layers are built for the CPU")
    total = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    kept: list[Tensor] = []
    found = peak(checkpoint, {}, lambda tensor: kept.append(tensor.clone() if copied else tensor))
    assert found[kind] > 0.8 * total
