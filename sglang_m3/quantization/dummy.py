"""Dummy weights for M3 (`--load-format dummy`) with which layers, routers and selections do something."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from sglang_m3.architectures import M3_ARCHITECTURES
from sglang_m3.models.weight_map import SCALE_SUFFIX
from sglang_m3.quantization.config import METHOD

SCALE_BYTES = (118, 119, 120)
"""2 ** -9 to 2 ** -7."""

VALUES_AT_A_TIME = 1 << 26


def around_initialize_dummy_weights(
    original: Callable[..., None], model: Module, *args: Any, **kwargs: Any
) -> None:
    """Around `initialize_dummy_weights`, which gives all tensors of a size the same numbers and leaves the
    bytes of scales zero: a network of zeros. Models other than M3 in BF16 or MXFP8 are filled by SGLang."""
    config = getattr(model, "quant_config", None)
    served = config is None or config.get_name() == METHOD
    if type(model).__name__ not in M3_ARCHITECTURES or not served:
        original(model, *args, **kwargs)
        return
    for name, tensor in model.state_dict().items():
        fill(name, tensor)


def fill(name: str, tensor: Tensor) -> None:
    """Random numbers of the name and the shape: different for equal tensors, the same on every rank and run.

    Matrices `[..., N, K]` have a standard deviation of 1 / sqrt(K), so activations stay of one size; scales
    are 2 ** -9 to 2 ** -7; vectors are within -0.1 to 0.1. Other integers stay as they are.
    """
    digest = hashlib.sha256(f"{name} {tuple(tensor.shape)}".encode()).digest()
    generator = torch.Generator(tensor.device).manual_seed(int.from_bytes(digest[:4], "little"))
    if name.endswith(SCALE_SUFFIX):
        tensor.random_(SCALE_BYTES[0], SCALE_BYTES[-1] + 1, generator=generator)
    elif tensor.is_floating_point() and tensor.dim() < 2:
        tensor.uniform_(-0.1, 0.1, generator=generator)
    elif tensor.is_floating_point():
        quantized = tensor.dtype == torch.float8_e4m3fn
        deviation = tensor.shape[-1] ** -0.5 * (256 if quantized else 1)
        for part in _parts(tensor):
            numbers = torch.empty(
                part.shape, dtype=torch.bfloat16 if quantized else part.dtype, device=part.device
            )
            part.copy_(numbers.normal_(0, deviation, generator=generator))


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Views of the whole tensor, few enough values each to be drawn beside it."""
    flat = tensor.view(-1)
    return iter(flat.split(VALUES_AT_A_TIME))
