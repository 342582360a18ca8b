"""Puts a layer's checkpoint tensors into MXFP8 parameters, whatever format they arrive in."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

import torch
from m3_kernels import quantize_mxfp8
from m3_kernels.reference.quantize_mxfp8 import SCALE_OF_NAN, VALUES_PER_SCALE
from torch import Tensor

from sglang_m3.models.loading import WeightError
from sglang_m3.models.weight_map import SCALE_SUFFIX

Origin = Literal["mxfp8", "plain"]
"""What the checkpoint says it holds."""

_VALUES = torch.float8_e4m3fn
PLAIN = (torch.bfloat16, torch.float16, torch.float32)
"""Types of unquantised weights."""


class WeightFormatError(WeightError):
    """A checkpoint tensor that is not what the format says; the message names it."""


class LayerTensors:
    """The checkpoint tensors of one layer: what is allowed, and what has arrived.

    Upstream's M3 model files only log what a weight loader raises for some tensors, so what was wrong with a
    tensor is kept until it arrives again, and raised when loading ends.
    """

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self._dtypes: dict[str, torch.dtype] = {}
        self._rows: dict[str, int] = {}
        self._plain: dict[str, None] = {}
        self._quantized: dict[str, None] = {}
        self._problems: dict[str, str] = {}

    def fail(self, name: str, problem: str) -> WeightFormatError:
        """The error to raise about a tensor."""
        self._problems[name] = f"{name} {problem}"
        return WeightFormatError(self._problems[name])

    def forget_problems(self) -> None:
        """Take back what was wrong: the update that brought it was refused."""
        self._problems.clear()

    def arrive(self, name: str, tensor: Tensor, columns: int, rows: int | None) -> None:
        """Check and note a tensor of the checkpoint.

        Args:
            name: the checkpoint's name of the weight, or of its scales.
            columns: of the whole weight, over all ranks.
            rows: likewise, None where the layer does not say.

        Raises:
            WeightFormatError: a dtype or shape that the format does not have, or that does not go with what
                has arrived of the layer.
        """
        self._problems.pop(name, None)
        scale = name.endswith(SCALE_SUFFIX)
        expected = columns // VALUES_PER_SCALE if scale else columns
        if scale and tensor.dtype != torch.uint8:
            raise self.fail(name, f"is {tensor.dtype}, MXFP8's scales are uint8 (UE8M0)")
        if not scale and tensor.dtype != _VALUES and tensor.dtype not in PLAIN:
            raise self.fail(name, f"is {tensor.dtype}; a weight is float8_e4m3fn, bfloat16 or float32")
        if columns % VALUES_PER_SCALE and (scale or tensor.dtype == _VALUES or self.origin == "plain"):
            raise self.fail(name, f"has {columns} columns, MXFP8 takes multiples of {VALUES_PER_SCALE}")
        if tensor.dim() != 2 or tensor.shape[1] != expected or rows not in (None, tensor.shape[0]):
            wanted = "any number of" if rows is None else rows
            found = tuple(tensor.shape)
            raise self.fail(name, f"has shape {found}, expected {wanted} rows and {expected} columns")
        if self.origin == "plain" and (scale or tensor.dtype == _VALUES):
            raise self.fail(
                name,
                "is in MXFP8, but config.json declares no quantization_config with quant_method mxfp8; "
                "take the config.json that belongs to these weights",
            )
        self._dtypes[name], self._rows[name] = tensor.dtype, tensor.shape[0]
        self._check_together(name)

    def _check_together(self, name: str) -> None:
        weight = name.removesuffix(SCALE_SUFFIX)
        scale = weight + SCALE_SUFFIX
        dtype = self._dtypes.get(weight)
        if dtype in PLAIN and scale in self._dtypes and self.origin == "mxfp8":
            raise self.fail(scale, f"are scales of a weight that is {dtype}, not float8_e4m3fn")
        if weight in self._rows and self._rows.get(scale, self._rows[weight]) != self._rows[weight]:
            raise self.fail(scale, f"have {self._rows[scale]} rows, their weight {self._rows[weight]}")
        if self.origin == "plain":
            return
        self._plain.pop(name, None)
        self._quantized.pop(name, None)
        (self._plain if self._dtypes[name] in PLAIN else self._quantized)[name] = None
        if self._plain and self._quantized:
            plain, quantized = next(iter(self._plain)), next(iter(self._quantized))
            raise self.fail(
                plain,
                f"is {self._dtypes[plain]} and {quantized} is MXFP8: "
                "tensors that SGLang keeps in one layer must have one format",
            )

    def check_complete(self) -> None:
        """Raise what was wrong; and, in a checkpoint of the format, weights and scales that came alone."""
        for problem in self._problems.values():
            raise WeightFormatError(problem)
        for name, dtype in self._dtypes.items():
            weight = name.removesuffix(SCALE_SUFFIX)
            if weight not in self._dtypes:
                raise WeightFormatError(f"{name} are scales without a weight: {weight} is not there")
            if dtype == _VALUES and name + SCALE_SUFFIX not in self._dtypes:
                raise WeightFormatError(
                    f"{name} is float8_e4m3fn without scales: {name + SCALE_SUFFIX} is not there"
                )


def quantize_on(
    device: torch.device, name: str, tensor: Tensor, tensors: LayerTensors
) -> tuple[Tensor, Tensor]:
    """The MXFP8 values and scales of a BF16 tensor, computed on `device`; the converter's bytes.

    Raises:
        WeightFormatError: infinite or NaN values.
    """
    values, scale = quantize_mxfp8(tensor.to(device))
    if (scale == SCALE_OF_NAN).any():
        raise tensors.fail(name, "has infinite or NaN values")
    return values, scale


def checkpoint_prefix(prefix: str) -> str:
    """The checkpoint's name of a module that SGLang calls `prefix`."""
    return re.sub(r"\.mlp\.(experts|shared_experts)\b", r".block_sparse_moe.\1", prefix)


def merged_name(prefix: str, merged: dict[str, list[str]], shard: int | str | None) -> str:
    """The checkpoint's name of a linear layer's weight, or of one of the weights merged in it."""
    path, _, layer = checkpoint_prefix(prefix).rpartition(".")
    parts = merged.get(layer)
    if shard is not None and parts is not None:
        layer = parts["qkv".index(shard) if isinstance(shard, str) else shard]
    return f"{path}.{layer}.weight"


Loader = Callable[..., None]
"""A weight loader of SGLang: parameter, loaded tensor, and what says where it belongs."""
