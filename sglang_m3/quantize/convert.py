"""Writes the converted checkpoint, file by file."""

from __future__ import annotations

import filecmp
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from m3_kernels.reference.quantize_mxfp8 import VALUES_PER_SCALE
from safetensors import safe_open
from safetensors.torch import save_file

from sglang_m3.quantize.names import SCALE_SUFFIX, is_quantized, quantization_config
from sglang_m3.quantize.shard import quantize_shard, same_bytes, verify_shard
from sglang_m3.quantize.source import CONFIG, INDEX, Shard, Source, TensorHeader, read_source


def quantize_checkpoint(
    source: str | Path, dest: str | Path, *, report: Callable[[str], None] = lambda line: None
) -> Path:
    """Writes the BF16 MiniMax-M3 checkpoint `source` in the released MXFP8 format to `dest`; returns `dest`.

    Files keep their names. Projections of attention, index and MLPs and all experts become E4M3 with UE8M0
    scales (`m3_kernels.reference.quantize_mxfp8`); every other tensor is copied byte for byte, and so are the
    other files of the folder itself, hidden ones excepted; config.json gains `quantization_config`. Host
    memory: one converted weight file, besides mapped files.

    A weight file is read back and compared with its source before it gets its name, and config.json comes
    last, so an interrupted conversion is no loadable checkpoint, and the same call completes it. Nothing is
    overwritten: files already in `dest` must be what the conversion would write, which is checked byte for
    byte. `report` receives one line per weight file.

    Raises FileNotFoundError, FileExistsError, or ValueError, naming the file or tensor; what headers and
    config files show is found before anything is written, and so is a lack of disk space (OSError).
    """
    checkpoint = read_source(Path(source).absolute())
    dest = Path(dest).absolute()
    texts = _json_files(checkpoint)
    dest.mkdir(parents=True, exist_ok=True)
    _check_dest(checkpoint, dest, texts)
    for number, shard in enumerate(checkpoint.shards, start=1):
        line = _convert(checkpoint, shard, dest)
        report(f"[{number}/{len(checkpoint.shards)}] {shard.name}: {line}")
    for name in checkpoint.other_files:
        if not (dest / name).exists():
            shutil.copyfile(checkpoint.folder / name, _partial(dest, name))
            _partial(dest, name).rename(dest / name)
    for name, text in texts.items():
        if not (dest / name).exists():
            _partial(dest, name).write_text(text, encoding="utf-8")
            _partial(dest, name).rename(dest / name)
    report(f"complete: {dest}")
    return dest


def _partial(dest: Path, name: str) -> Path:
    """Where a file is written before it is complete; a later run replaces what an interrupted one left."""
    return dest / f".{name}.partial"


def _json_files(checkpoint: Source) -> dict[str, str]:
    """The files that the conversion changes, by name, in the order to write them."""
    names = [name for shard in checkpoint.shards for name in shard.tensors]
    contents: dict[str, Any] = {}
    if checkpoint.index:
        weight_map, total = {}, 0
        for shard in checkpoint.shards:
            for name, header in shard.tensors.items():
                weight_map[name] = shard.name
                if is_quantized(name):
                    weight_map[name + SCALE_SUFFIX] = shard.name
                total += _converted_bytes(name, header)
        metadata = {**checkpoint.index.get("metadata", {}), "total_size": total}
        contents[INDEX] = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    contents[CONFIG] = {**checkpoint.config, "quantization_config": quantization_config(names)}
    return {
        name: json.dumps(content, indent=2, ensure_ascii=False) + "\n" for name, content in contents.items()
    }


def _converted_bytes(name: str, header: TensorHeader) -> int:
    if not is_quantized(name):
        return header.nbytes
    rows, columns = header.shape
    return rows * (columns + columns // VALUES_PER_SCALE)


def _check_dest(checkpoint: Source, dest: Path, texts: dict[str, str]) -> None:
    """Refuses too small a disk, and other content as far as that shows without reading weights."""
    shards = {shard.name for shard in checkpoint.shards}
    strange = sorted(path.name for path in dest.glob("*.safetensors") if path.name not in shards)
    strange += [
        name
        for name, text in texts.items()
        if (dest / name).exists() and (dest / name).read_text("utf-8") != text
    ]
    strange += [
        name
        for name in checkpoint.other_files
        if (dest / name).exists() and not filecmp.cmp(checkpoint.folder / name, dest / name, shallow=False)
    ]
    if strange:
        raise FileExistsError(f"{dest} holds something other than this conversion: {strange}")
    needed = sum(
        _converted_bytes(name, header)
        for shard in checkpoint.shards
        if not (dest / shard.name).exists()
        for name, header in shard.tensors.items()
    )
    free = shutil.disk_usage(dest).free
    if needed > free:
        raise OSError(f"{dest} needs {needed / 2**30:.1f} GiB more, and {free / 2**30:.1f} GiB are free")


def _convert(checkpoint: Source, shard: Shard, dest: Path) -> str:
    """Writes one weight file, or checks the one that is there; returns what to report."""
    started = time.monotonic()
    source, target = checkpoint.folder / shard.name, dest / shard.name
    tensors = quantize_shard(source)
    if target.exists():
        with safe_open(target, framework="pt") as present:
            names = set(present.keys())
            differ = sorted(names ^ tensors.keys()) or [
                name for name in sorted(names) if not same_bytes(tensors[name], present.get_tensor(name))
            ]
        if differ:
            raise FileExistsError(f"{target} is not this conversion: {differ[0]} differs")
        return f"already there, and right, {time.monotonic() - started:.1f} s"
    partial = _partial(dest, shard.name)
    save_file(tensors, partial, metadata=shard.metadata or None)
    partial.chmod(0o644)  # safetensors writes for the owner alone
    quantized = len(tensors) - len(shard.tensors)
    size = sum(tensor.nbytes for tensor in tensors.values())
    del tensors
    error = verify_shard(source, partial)
    partial.rename(target)
    return (
        f"{quantized} tensors quantised (relative error {error.relative:.4f}), "
        f"{len(shard.tensors) - quantized} kept, {size / 2**30:.2f} GiB, {time.monotonic() - started:.1f} s"
    )
