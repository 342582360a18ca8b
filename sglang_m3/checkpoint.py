"""A checkpoint's weight files: are they there and whole, and are their numbers numbers."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from sglang_m3.quantize.names import SCALE_SUFFIX

INDEX = "model.safetensors.index.json"
CHUNK_ELEMENTS = 2**24
NAN_SCALE = 255
"""The one UE8M0 scale that is not a power of two (OCP Microscaling Formats 1.0, section 5.4.1)."""


class CheckpointError(ValueError):
    """Weight files that cannot be loaded; the message names them and says what to do."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in order: those of its index, or all that are there.

    Raises:
        CheckpointError: there are none, or the index names files that are not there or is no index.
    """
    index = folder / INDEX
    if not index.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise CheckpointError(f"{folder} has no weight files (*.safetensors); download them first")
        return found
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [folder / name for name in sorted(set(weight_map.values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of weight files; download it again") from error
    missing = [path.name for path in files if not path.is_file()]
    if missing or not files:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the {len(files)} weight files that {INDEX} names: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}; download them again"
        )
    return files


def check_files(folder: Path) -> None:
    """Check that every weight file is there and as long as its header says. Reads headers only.

    Raises:
        CheckpointError: see `weight_files`; or a file is cut short, or is no safetensors file.
    """
    for path in weight_files(folder):
        size = path.stat().st_size
        needed = _bytes_needed(path, size)
        if size != needed:
            raise CheckpointError(
                f"{path} has {size} bytes, but its header says {needed}: it is incomplete; download it again"
            )


def check_local(model_path: str, load_format: str) -> None:
    """Check a checkpoint that is here; one that is to be downloaded cannot be checked yet.

    Raises:
        CheckpointError: see `check_files`.
    """
    folder = Path(model_path)
    if load_format in ("auto", "safetensors") and any(folder.glob("*.safetensors*")):
        check_files(folder)


def _bytes_needed(path: Path, size: int) -> int:
    """8 bytes with the header's length, the header, and as many bytes as the last tensor ends at."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        try:
            if 8 + length > size:
                raise ValueError("the header does not fit")
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise CheckpointError(
                f"{path} ({size} bytes) is no safetensors file, or only the beginning or a pointer to one; "
                "download it again"
            ) from error
    return 8 + length + max(ends, default=0)


@dataclass(frozen=True)
class BadTensor:
    """A tensor with values that no weight has.

    Attributes:
        file, name: where it is.
        nans, infinities: how many values.
        first: index of the first of them in the flattened tensor.
    """

    file: str
    name: str
    nans: int
    infinities: int
    first: int


def bad_tensors(folder: Path) -> Iterator[BadTensor]:
    """Read all weights, one tensor at a time, and yield those with NaN or infinite values.

    A UE8M0 scale of 255 is a NaN.

    Raises:
        CheckpointError: see `check_files`.
    """
    check_files(folder)
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                found = _inspect(path.name, name, file.get_tensor(name))
                if found is not None:
                    yield found


def _inspect(file: str, name: str, tensor: Tensor) -> BadTensor | None:
    is_scale = name.endswith(SCALE_SUFFIX) and tensor.dtype == torch.uint8
    if not (tensor.is_floating_point() or is_scale):
        return None
    nans = infinities = 0
    first = -1
    for begin in range(0, tensor.numel(), CHUNK_ELEMENTS):
        chunk = tensor.flatten()[begin : begin + CHUNK_ELEMENTS]
        values = chunk if is_scale else chunk.float()
        is_nan = values == NAN_SCALE if is_scale else values.isnan()
        is_infinite = torch.zeros_like(is_nan) if is_scale else values.isinf()
        nans, infinities = nans + int(is_nan.sum()), infinities + int(is_infinite.sum())
        if first < 0 and (nans or infinities):
            first = begin + int((is_nan | is_infinite).nonzero()[0])
    return BadTensor(file, name, nans, infinities, first) if first >= 0 else None
