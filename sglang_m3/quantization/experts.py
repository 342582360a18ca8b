"""Routed experts with MXFP8 weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from m3_kernels import mxfp8_experts
from m3_kernels.reference.quantize_mxfp8 import VALUES_PER_SCALE
from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.utils import set_weight_attrs
from torch import Tensor
from torch.nn import Module, Parameter

from sglang_m3.models.weight_map import SCALE_SUFFIX
from sglang_m3.quantization.deep_gemm import grouped_experts
from sglang_m3.quantization.layout import TOKENS_PER_EXPERT, check_numbers, coarsen, renew
from sglang_m3.quantization.loading import PLAIN, LayerTensors, Loader, checkpoint_prefix, quantize_on

if TYPE_CHECKING:
    from sglang_m3.quantization.config import M3MxFp8Config

SHARED_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Names of a shared expert's projections, which SGLang may keep behind the routed ones."""


class M3MxFp8ExpertsMethod(FusedMoEMethodBase):
    """Keeps `w13_weight` `[E, 2 I, K]`, gate first, and `w2_weight` `[E, K, I]`, float8_e4m3fn, with their
    scales `..._scale_inv`, uint8, one per 32 values of the last dimension.

    It has no MoE runner of SGLang's: whatever `--moe-runner-backend` says, M3's experts are computed here.
    """

    runner = None

    def __init__(self, config: M3MxFp8Config, prefix: str) -> None:
        self.config = config
        self.prefix = prefix
        self.tensors = LayerTensors(config.origin)

    def create_weights(
        self,
        layer: Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: Loader,
        moe_intermediate_size: int,
        **attributes: Any,
    ) -> None:
        """Called by SGLang's `FusedMoE`.

        Raises:
            ValueError: this rank's share of the experts' width is no multiple of 32.
        """
        inner = intermediate_size_per_partition
        if inner % VALUES_PER_SCALE or hidden_size % VALUES_PER_SCALE:
            raise ValueError(
                f"{self.prefix}: experts of {hidden_size} x {inner} on a rank; MXFP8 needs multiples of "
                f"{VALUES_PER_SCALE}, use a smaller --tp-size or --ep-size"
            )
        shapes = {
            "w13_weight": (num_experts, 2 * inner, hidden_size),
            "w2_weight": (num_experts, hidden_size, inner),
        }
        whole = {"w1": (moe_intermediate_size, hidden_size), "w2": (hidden_size, moe_intermediate_size)}

        def load(
            parameter: Parameter, loaded: Tensor, weight_name: str, shard_id: str, expert_id: int
        ) -> None:
            if not _is_here(layer, expert_id):
                return
            scale = weight_name.endswith(SCALE_SUFFIX)
            name = self._name(layer, expert_id, shard_id) + (SCALE_SUFFIX if scale else "")
            if not scale and self.config.origin == "mxfp8" and loaded.dtype in PLAIN:
                raise self.tensors.fail(
                    name,
                    f"is {loaded.dtype}: experts of an MXFP8 checkpoint must be quantised; "
                    "convert the BF16 checkpoint with python -m sglang_m3.quantize",
                )
            rows, columns = whole["w2" if shard_id == "w2" else "w1"]
            self.tensors.arrive(name, loaded, columns, rows)
            if not scale and loaded.dtype in PLAIN:
                loaded, scales = quantize_on(parameter.device, name, loaded, self.tensors)
                other = layer.get_parameter(weight_name.rpartition(".")[2] + SCALE_SUFFIX)
                weight_loader(other, scales, weight_name + SCALE_SUFFIX, shard_id, expert_id)
            weight_loader(parameter, loaded, weight_name, shard_id, expert_id)

        for name, shape in shapes.items():
            scale_shape = (*shape[:-1], shape[-1] // VALUES_PER_SCALE)
            weight = Parameter(torch.empty(shape, dtype=torch.float8_e4m3fn), requires_grad=False)
            scale = Parameter(torch.empty(scale_shape, dtype=torch.uint8), requires_grad=False)
            for path, parameter in ((name, weight), (name + SCALE_SUFFIX, scale)):
                set_weight_attrs(parameter, {"weight_loader": load, "quant_method": "block"})
                layer.register_parameter(path, parameter)

    def _name(self, layer: Module, expert: int, shard: str) -> str:
        """The checkpoint's name of an expert's weight."""
        path = checkpoint_prefix(self.prefix)
        if expert >= layer.num_global_routed_experts:
            path = path.removesuffix("experts")
            return f"{path}shared_experts.{SHARED_PROJECTIONS[shard]}.weight"
        return f"{path}.{expert}.{shard}.weight"

    def create_moe_runner(self, layer: Module, moe_runner_config: MoeRunnerConfig) -> None:
        """Checks that the layer asks for what the operator computes: M3's activation, weights at the end."""
        config = moe_runner_config
        assert config.activation == "silu" and config.is_gated and not config.gate_up_interleaved
        assert config.gemm1_alpha is not None and config.gemm1_clamp_limit is not None
        assert not config.apply_router_weight_on_input and not config.no_combine
        self._alpha, self._limit = config.gemm1_alpha, config.gemm1_clamp_limit

    def process_weights_after_loading(self, layer: Module) -> None:
        """Raise what was wrong with the layer's tensors (`WeightFormatError`); bring them into the layout."""
        self.tensors.check_complete()
        scales = {}
        before = getattr(layer, "block_scales", None) or {}
        for name in ("w13_weight", "w2_weight"):
            label = f"{checkpoint_prefix(self.prefix)}.{name.removesuffix('_weight')}"
            check_numbers(layer.get_parameter(name), layer.get_parameter(name + SCALE_SUFFIX), label)
            scales[name] = renew(before.get(name), coarsen(layer, name, name + SCALE_SUFFIX, label))
        layer.block_scales = None if None in scales.values() else scales

    def apply(self, layer: Module, dispatch_output: StandardDispatchOutput) -> StandardCombineInput:
        """The sum over the experts on this rank; ids are the rank's own, -1 for another rank's experts."""
        x = dispatch_output.hidden_states
        weights, ids, _ = dispatch_output.topk_output
        many = self.takes_many(layer, x.shape[0], on_gpu=x.is_cuda)
        multiply = self.multiply_many if many else self.multiply_few
        return StandardCombineInput(hidden_states=multiply(layer, x, ids, weights))

    def takes_many(self, layer: Module, tokens: int, *, on_gpu: bool) -> bool:
        """Whether so many tokens go through DeepGEMM."""
        expected = tokens * layer.top_k
        return on_gpu and layer.block_scales is not None and expected > TOKENS_PER_EXPERT * layer.num_experts

    def multiply_few(self, layer: Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """By the weights' exact numbers."""
        return mxfp8_experts(
            x,
            layer.w13_weight,
            layer.w13_weight_scale_inv,
            layer.w2_weight,
            layer.w2_weight_scale_inv,
            ids,
            weights,
            alpha=self._alpha,
            limit=self._limit,
            first_expert=0,
            model_experts=layer.num_experts,
        )

    def multiply_many(self, layer: Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Through DeepGEMM, with activations in E4M3."""
        return grouped_experts(
            x,
            (layer.w13_weight, layer.block_scales["w13_weight"]),
            (layer.w2_weight, layer.block_scales["w2_weight"]),
            ids,
            weights,
            alpha=self._alpha,
            limit=self._limit,
            model_experts=layer.num_experts,
        )


def _is_here(layer: Module, expert: int) -> bool:
    """Whether this rank keeps the expert; with an expert placement of SGLang's, its loader decides."""
    placed = get_global_expert_location_metadata() is not None and layer.uses_expert_location
    return placed or layer._map_global_expert_id_to_local_expert_id(expert) != -1
