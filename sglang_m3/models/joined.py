"""Two unquantised projections of one input as one matrix product, their parameters still two.

The weights lie behind each other in one piece of memory. Loading and updating write into the parameters, as
SGLang's loaders do, and so into the joined weight as well. Whoever moves a parameter elsewhere (offloading,
packing for a CPU's matrix unit) parts the two, and each is multiplied by itself again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor


@dataclass(frozen=True)
class Joined:
    """What a linear method of SGLang's reads of a layer: `weight` is `[rows of both, inputs]`."""

    weight: Tensor


def lay_together(first: LinearBase, second: LinearBase) -> None:
    """Move the second one's weight behind the first one's, before anything is loaded; quantised ones stay."""
    if not all(isinstance(layer.quant_method, UnquantizedLinearMethod) for layer in (first, second)):
        return
    weights = (first.weight, second.weight)
    assert first.bias is None and second.bias is None and weights[0].dtype == weights[1].dtype
    together = torch.cat([weight.data for weight in weights])
    for weight, part in zip(weights, together.split([len(weight) for weight in weights])):
        weight.data = part


def joined(first: LinearBase, second: LinearBase) -> Joined | None:
    """Both weights as one, in place; None where they do not lie together."""
    if not isinstance(first.quant_method, UnquantizedLinearMethod):
        return None
    upper, lower = first.weight, second.weight
    if upper.data_ptr() + upper.nbytes != lower.data_ptr() or upper.shape[1:] != lower.shape[1:]:
        return None
    if upper.untyped_storage().data_ptr() != lower.untyped_storage().data_ptr():
        return None
    return Joined(upper.data.as_strided((len(upper) + len(lower), *upper.shape[1:]), upper.stride()))


def project(first: LinearBase, second: LinearBase, inputs: Tensor) -> tuple[Tensor, ...]:
    """`[T, inputs]` to the outputs, `[T, outputs of both]` of one product or two `[T, outputs]`."""
    one = joined(first, second)
    if one is None:
        return first(inputs)[0], second(inputs)[0]
    return (first.quant_method.apply(one, inputs),)
