"""Reads what a checkpoint holds from headers and config files, and refuses what cannot be converted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3_kernels.reference.quantize_mxfp8 import VALUES_PER_SCALE

from sglang_m3.architectures import M3_ARCHITECTURES
from sglang_m3.quantize.names import SCALE_SUFFIX, has_no_rule, is_quantized

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"


@dataclass(frozen=True)
class TensorHeader:
    """What a weight file's header says of one tensor."""

    dtype: str
    """The file format's name, such as BF16."""
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Shard:
    """One weight file."""

    name: str
    metadata: dict[str, str]
    tensors: dict[str, TensorHeader]


@dataclass(frozen=True)
class Source:
    """A checkpoint that can be converted."""

    folder: Path
    config: dict[str, Any]
    index: dict[str, Any] | None
    """None for a checkpoint of a single weight file."""
    shards: tuple[Shard, ...]
    other_files: tuple[str, ...]
    """Names of the tokenizer's and the other files, in the folder itself and not hidden."""


def read_source(folder: Path) -> Source:
    """Reads and checks a checkpoint. No weight is read.

    Raises FileNotFoundError when files are missing, ValueError naming the tensor or file for anything but a
    complete, unquantised MiniMax-M3.
    """
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if not set(config.get("architectures") or ()) & set(M3_ARCHITECTURES):
        raise ValueError(f"{folder} is not MiniMax-M3: its architectures are {config.get('architectures')}")
    for part in (config, config.get("text_config") or {}):
        if "quantization_config" in part:
            method = part["quantization_config"].get("quant_method")
            raise ValueError(f"{folder} is already quantised: quant_method {method!r} in {CONFIG}")
    index = None
    if (folder / INDEX).exists():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    names = sorted(set(index["weight_map"].values())) if index else [SINGLE]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {len(missing)} of {len(names)} weight files: {missing}")
    shards = tuple(_read_shard(folder / name) for name in names)
    if index:
        _check_index(index["weight_map"], shards)
    for shard in shards:
        for name, header in shard.tensors.items():
            _check_tensor(shard.name, name, header)
    if not any(is_quantized(name) for shard in shards for name in shard.tensors):
        raise ValueError(f"{folder} has no tensor that the MXFP8 format quantises, under the released names")
    others = sorted(
        path.name
        for path in folder.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and path.suffix != ".safetensors"
        and path.name not in (CONFIG, INDEX)
    )
    return Source(folder, config, index, shards, tuple(others))


def _read_shard(path: Path) -> Shard:
    """The header: its length in 8 bytes, little-endian, then JSON with the bytes that each tensor takes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length:
            raise ValueError(f"{path} is incomplete, or no weight file (a pointer to one, perhaps)")
        header = json.loads(file.read(length))
    metadata = header.pop("__metadata__", {})
    ends = [entry["data_offsets"][1] for entry in header.values()]
    if size != 8 + length + max(ends, default=0):
        raise ValueError(f"{path} is incomplete: its size is not what its header says")
    tensors = {
        name: TensorHeader(
            entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0]
        )
        for name, entry in header.items()
    }
    return Shard(path.name, metadata, tensors)


def _check_index(weight_map: dict[str, str], shards: tuple[Shard, ...]) -> None:
    found = {name: shard.name for shard in shards for name in shard.tensors}
    wrong = sorted(
        name for name in found.keys() | weight_map.keys() if found.get(name) != weight_map.get(name)
    )
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{INDEX} puts {name} into {weight_map.get(name)}, but it is in {found.get(name)} "
            f"({len(wrong)} such tensors)"
        )


def _check_tensor(shard: str, name: str, header: TensorHeader) -> None:
    problem = None
    if name.endswith(SCALE_SUFFIX) or header.dtype.startswith("F8"):
        problem = "the checkpoint is already quantised"
    elif has_no_rule(name, header.shape):
        problem = "a matrix of a text layer that the MXFP8 format has no rule for"
    elif is_quantized(name):
        if header.dtype not in ("BF16", "F16", "F32"):
            problem = "only BF16, F16 and F32 can be quantised"
        elif len(header.shape) != 2:
            problem = "only matrices can be quantised"
        elif header.shape[1] % VALUES_PER_SCALE:
            problem = f"K = {header.shape[1]} is not a multiple of {VALUES_PER_SCALE}"
    if problem:
        raise ValueError(f"{name} ({header.dtype} {list(header.shape)}) in {shard}: {problem}")
