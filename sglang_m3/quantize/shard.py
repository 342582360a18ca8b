"""Quantises one weight file, and checks what was written against where it came from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import torch
from m3_kernels.reference.dequantize_mxfp8 import dequantize_mxfp8
from m3_kernels.reference.quantize_mxfp8 import SCALE_OF_NAN, VALUES_PER_SCALE, quantize_mxfp8
from safetensors import safe_open
from torch import Tensor

from sglang_m3.quantize.names import SCALE_SUFFIX, is_quantized

VALUES_AT_A_TIME = 1 << 20
"""Values quantised or compared at a time, few enough for the caches of a core."""


@dataclass(frozen=True)
class ShardError:
    """How far the written numbers are from the source's, over all quantised tensors of a shard."""

    error_squares: float
    """Sum of the squared differences."""
    value_squares: float
    """Sum of the squared values."""

    @property
    def relative(self) -> float:
        """Root of the mean squared error, relative to the values'."""
        return sqrt(self.error_squares / self.value_squares) if self.value_squares else 0.0


def quantize_shard(path: Path) -> dict[str, Tensor]:
    """The tensors of the converted file: quantised weights, their scales, and all others as they are.

    Raises ValueError naming the tensor for infinite or NaN values in a weight to quantise.
    """
    out: dict[str, Tensor] = {}
    with safe_open(path, framework="pt") as source:
        for name in source.keys():  # noqa: SIM118 (not a mapping)
            tensor = source.get_tensor(name)
            if is_quantized(name):
                out[name], out[name + SCALE_SUFFIX] = _quantize(name, tensor)
            else:
                out[name] = tensor
    return out


def _quantize(name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = tensor.shape
    weight = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows, columns // VALUES_PER_SCALE, dtype=torch.uint8)
    for part in _row_parts(tensor):
        weight[part], scale[part] = quantize_mxfp8(tensor[part])
    if (scale == SCALE_OF_NAN).any():
        raise ValueError(f"{name} has infinite or NaN values")
    return weight, scale


def _row_parts(tensor: Tensor) -> Iterator[slice]:
    rows = max(1, VALUES_AT_A_TIME // max(1, tensor.shape[1]))
    return (slice(begin, begin + rows) for begin in range(0, tensor.shape[0], rows))


def verify_shard(source_path: Path, written_path: Path) -> ShardError:
    """Reads a converted file back and compares it with its source.

    Dequantised numbers must be as near to the source's as the format allows, other tensors the same byte for
    byte, and there must be no tensor too few or too many. Raises ValueError naming the tensor otherwise.
    """
    error_squares, value_squares = 0.0, 0.0
    with safe_open(source_path, framework="pt") as source, safe_open(written_path, framework="pt") as written:
        names = set(source.keys())
        expected = names | {name + SCALE_SUFFIX for name in names if is_quantized(name)}
        if expected != set(written.keys()):
            raise ValueError(f"{written_path}: {sorted(expected ^ set(written.keys()))} too few or too many")
        for name in sorted(names):
            original, copy = source.get_tensor(name), written.get_tensor(name)
            if not is_quantized(name):
                if not same_bytes(original, copy):
                    raise ValueError(f"{written_path}: {name} was not written as it was")
                continue
            scale = written.get_tensor(name + SCALE_SUFFIX)
            for part in _row_parts(original):
                values = original[part].float()
                error = dequantize_mxfp8(copy[part], scale[part], torch.float32).sub_(values).abs_()
                if not (error <= _error_bound(values)).all():
                    raise ValueError(f"{written_path}: {name} is further from its source than MXFP8 allows")
                error_squares += float(error.square_().sum(dtype=torch.float64))
                value_squares += float(values.square_().sum(dtype=torch.float64))
    return ShardError(error_squares, value_squares)


def _error_bound(values: Tensor) -> Tensor:
    """Largest error of each value under the best scale, whatever scale was written.

    Half a unit in the last place is at most 2 ** -4 of an E4M3 number, and 2 ** -10 scales among the
    subnormal ones; the best scale is below amax / 224, or the smallest.
    """
    groups = values.unflatten(1, (-1, VALUES_PER_SCALE)).abs()
    scale = groups.amax(-1, keepdim=True).div_(224).clamp_(min=2.0**-126)
    return groups.div_(16).maximum(scale.mul_(2.0**-10)).flatten(1)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits, NaN and the signs of zeros included."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    )
