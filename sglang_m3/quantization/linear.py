"""Linear layers with MXFP8 weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from m3_kernels import mxfp8_linear
from m3_kernels.reference.coarsen_mxfp8 import BLOCK
from m3_kernels.reference.quantize_mxfp8 import VALUES_PER_SCALE
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.utils import set_weight_attrs
from torch import Tensor
from torch.nn import Module, Parameter

from sglang_m3.models.weight_map import SCALE_SUFFIX
from sglang_m3.quantization.deep_gemm import multiply
from sglang_m3.quantization.layout import check_numbers, coarsen, renew, takes_deep_gemm
from sglang_m3.quantization.loading import LayerTensors, Loader, merged_name, quantize_on

if TYPE_CHECKING:
    from sglang_m3.quantization.config import M3MxFp8Config


class M3MxFp8LinearMethod(LinearMethodBase):
    """Keeps `weight` `[N, K]` float8_e4m3fn and `weight_scale_inv` `[N, K // 32]` uint8.

    A layer whose weights arrive unquantised from a checkpoint in the format becomes an unquantised one.
    """

    def __init__(self, config: M3MxFp8Config, prefix: str) -> None:
        self.config = config
        self.prefix = prefix
        self.tensors = LayerTensors(config.origin)

    def create_weights(
        self,
        layer: Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: Loader,
        **attributes: Any,
    ) -> None:
        """Called by SGLang's linear layers.

        Raises:
            ValueError: this rank's share of K is no multiple of 32.
        """
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        if columns % VALUES_PER_SCALE:
            remedy = "" if input_size % VALUES_PER_SCALE else ", use a smaller --tp-size"
            name = merged_name(self.prefix, self.config.packed_modules_mapping, None)
            raise ValueError(
                f"{name}: {columns} of {input_size} columns on a rank; MXFP8 needs multiples of "
                f"{VALUES_PER_SCALE}{remedy}"
            )
        weight = Parameter(torch.empty(rows, columns, dtype=torch.float8_e4m3fn), requires_grad=False)
        scale = Parameter(
            torch.empty(rows, columns // VALUES_PER_SCALE, dtype=torch.uint8), requires_grad=False
        )

        def load(parameter: Parameter, loaded: Tensor, *shard: int | str) -> None:
            name = merged_name(self.prefix, self.config.packed_modules_mapping, *(shard or (None,)))
            name += SCALE_SUFFIX if parameter is scale else ""
            self.tensors.arrive(name, loaded, input_size, _rows(layer, *shard))
            self._check_format_stays(layer, name, loaded)
            if parameter is scale or loaded.dtype == torch.float8_e4m3fn:
                weight_loader(parameter, loaded, *shard)
            elif self.config.origin == "plain":
                values, scales = quantize_on(weight.device, name, loaded, self.tensors)
                weight_loader(weight, values, *shard)
                weight_loader(scale, scales, *shard)
            else:
                self._become_plain(layer, params_dtype)
                weight_loader(parameter, loaded, *shard)

        for parameter in (weight, scale):
            set_weight_attrs(
                parameter, {"input_dim": 1, "output_dim": 0, "weight_loader": load, **attributes}
            )
        layer.register_parameter("weight", weight)
        layer.register_parameter("weight" + SCALE_SUFFIX, scale)

    def _check_format_stays(self, layer: Module, name: str, loaded: Tensor) -> None:
        """Captured graphs hold the addresses of weights and scales, so an update keeps a layer's format."""
        plain = layer.quant_method is not self
        quantized = loaded.dtype in (torch.float8_e4m3fn, torch.uint8)
        if plain and quantized:
            raise self.tensors.fail(name, "is MXFP8, but the layer's weights are unquantised")
        if hasattr(layer, "weight_block_scale") and not quantized and self.config.origin == "mxfp8":
            raise self.tensors.fail(name, f"is {loaded.dtype}, but the layer's weights in use are MXFP8")

    def _become_plain(self, layer: Module, dtype: torch.dtype) -> None:
        """Give the layer room for unquantised weights, at their first arrival."""
        if layer.quant_method is not self:
            return
        layer.weight.data = torch.empty_like(layer.weight, dtype=dtype)
        layer.get_parameter("weight" + SCALE_SUFFIX).data = layer.weight.new_empty(0, dtype=torch.uint8)
        layer.quant_method = _PlainLinearMethod(self.tensors)

    def process_weights_after_loading(self, layer: Module) -> None:
        """Raise what was wrong with the layer's tensors (`WeightFormatError`); bring them into the layout."""
        self.tensors.check_complete()
        label = merged_name(self.prefix, self.config.packed_modules_mapping, None)
        check_numbers(layer.weight, layer.weight_scale_inv, label)
        before = getattr(layer, "weight_block_scale", getattr(layer, "block_scale_room", None))
        layer.weight_block_scale = renew(before, coarsen(layer, "weight", "weight" + SCALE_SUFFIX, label))

    @staticmethod
    def make_room_for_block_scales(layers: Sequence[Module]) -> None:
        """Let the scales of the layers' blocks, which exist once weights are loaded, lie behind each other.

        Does nothing where blocks of 128 x 128 do not divide a weight.
        """
        shapes = [layer.weight.shape for layer in layers]
        if any(rows % BLOCK or columns % BLOCK for rows, columns in shapes):
            return
        rows = [rows // BLOCK for rows, _ in shapes]
        weight = layers[0].weight
        room = torch.empty(sum(rows), weight.shape[1] // BLOCK, dtype=torch.float32, device=weight.device)
        for layer, part in zip(layers, room.split(rows)):
            layer.block_scale_room = part

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`[..., K]` -> `[..., N]` in `x`'s dtype."""
        rows = x.reshape(-1, x.shape[-1])
        if rows.is_cuda:
            compile_for_all_steps(layer.weight, layer.weight_scale_inv, rows.dtype)
        many = rows.is_cuda and takes_deep_gemm(rows.shape[0], layer.weight.shape[0])
        blocks = layer.weight_block_scale if many else None
        if blocks is not None:
            out = multiply(rows, (layer.weight, blocks))
        else:
            out = mxfp8_linear(rows, layer.weight, layer.weight_scale_inv)
        out = out.reshape(*x.shape[:-1], out.shape[-1])
        return out if bias is None else out + bias


_compiled: set[tuple[torch.Size, torch.device]] = set()


def compile_for_all_steps(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    """At the first product by a weight of this shape, run one for every kernel that another step may need.

    So no request waits for a compiler. Does nothing while a graph is being captured.
    """
    key = (weight.shape, weight.device)
    if key in _compiled or torch.cuda.is_current_stream_capturing():
        return
    from m3_kernels.triton.sm90_mxfp8_linear import TOKENS_OF_EVERY_KERNEL

    _compiled.add(key)
    for tokens in TOKENS_OF_EVERY_KERNEL:
        mxfp8_linear(torch.zeros(tokens, weight.shape[1], dtype=dtype, device=weight.device), weight, scale)


class _PlainLinearMethod(UnquantizedLinearMethod):
    """A layer that a checkpoint in the format leaves unquantised."""

    def __init__(self, tensors: LayerTensors) -> None:
        super().__init__()
        self.tensors = tensors

    def process_weights_after_loading(self, layer: Module) -> None:
        self.tensors.check_complete()
        super().process_weights_after_loading(layer)


def _rows(layer: Module, shard: int | str | None = None) -> int | None:
    """Rows of a tensor that belongs into the layer, over all ranks; None where the layer does not say."""
    if shard is None:
        return None if isinstance(layer, MergedColumnParallelLinear) else layer.output_size
    if isinstance(layer, QKVParallelLinear):
        return {
            "q": layer.total_num_heads * layer.head_size,
            "k": layer.total_num_kv_heads * layer.head_size,
            "v": layer.total_num_kv_heads * layer.v_head_size,
        }[shard]
    return layer.output_sizes[shard] if isinstance(layer, MergedColumnParallelLinear) else None
