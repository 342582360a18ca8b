"""Two projections of one input as one matrix product, their parameters still two.

The weights lie behind each other in one piece of memory, and so do MXFP8's scales and its scales of blocks.
Loading and updating write into the parameters, as SGLang's loaders do, and so into the joined weight as well.
Whoever moves a parameter elsewhere (offloading, packing for a CPU's matrix unit, an MXFP8 checkpoint that
leaves a layer unquantised) parts the two, and each is multiplied by itself again.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor

from sglang_m3.models.weight_map import SCALE_SUFFIX
from sglang_m3.quantization.linear import M3MxFp8LinearMethod

PARAMETERS = {UnquantizedLinearMethod: ("weight",), M3MxFp8LinearMethod: ("weight", "weight" + SCALE_SUFFIX)}
"""Whose products can be joined, and of which parameters."""


@dataclass(frozen=True)
class Joined:
    """What the two linear methods read of a layer.

    Attributes:
        weight: `[rows of both, inputs]`.
        weight_scale_inv: of MXFP8, `[rows of both, inputs // 32]`; else None.
        weight_block_scale: of MXFP8, `[rows of both // 128, inputs // 128]`; None where a layer has none.
    """

    weight: Tensor
    weight_scale_inv: Tensor | None
    weight_block_scale: Tensor | None


def lay_together(first: LinearBase, second: LinearBase) -> None:
    """Move the second one's parameters behind the first one's, before anything is loaded, if both have one of
    the methods above."""
    for name in _names(first, second):
        parameters = [layer.get_parameter(name) for layer in (first, second)]
        assert first.bias is None and second.bias is None and parameters[0].dtype == parameters[1].dtype
        rows = [len(parameter) for parameter in parameters]
        together = parameters[0].data.new_empty(sum(rows), *parameters[0].shape[1:])
        for parameter, part in zip(parameters, together.split(rows)):
            parameter.data = part.copy_(parameter.data)
    layers = (first, second)
    if all(isinstance(layer.quant_method, M3MxFp8LinearMethod) for layer in layers):
        M3MxFp8LinearMethod.make_room_for_block_scales(layers)


def joined(first: LinearBase, second: LinearBase) -> Joined | None:
    """Both weights as one, in place; None where they do not lie together."""
    names = _names(first, second)
    found = [_in_place(*(layer.get_parameter(name).data for layer in (first, second))) for name in names]
    if not found or any(together is None for together in found):
        return None
    scales = [getattr(layer, "weight_block_scale", None) for layer in (first, second)]
    blocks = None if any(scale is None for scale in scales) else _in_place(*scales)
    return Joined(found[0], found[1] if len(found) == 2 else None, blocks)


def _in_place(upper: Tensor, lower: Tensor) -> Tensor | None:
    """Two matrices that lie behind each other in one piece of memory as one; None where they do not."""
    if upper.data_ptr() + upper.nbytes != lower.data_ptr() or upper.shape[1:] != lower.shape[1:]:
        return None
    if upper.untyped_storage().data_ptr() != lower.untyped_storage().data_ptr():
        return None
    return upper.as_strided((len(upper) + len(lower), *upper.shape[1:]), upper.stride())


def project(first: LinearBase, second: LinearBase, inputs: Tensor) -> tuple[Tensor, ...]:
    """`[T, inputs]` to the outputs, `[T, outputs of both]` of one product or two `[T, outputs]`."""
    one = joined(first, second)
    if one is None:
        return first(inputs)[0], second(inputs)[0]
    return (first.quant_method.apply(one, inputs),)


def _names(first: LinearBase, second: LinearBase) -> tuple[str, ...]:
    """The parameters that make a weight, of both layers alike; none where their products cannot be joined."""
    for method, names in PARAMETERS.items():
        if isinstance(first.quant_method, method) and isinstance(second.quant_method, method):
            return names
    return ()
