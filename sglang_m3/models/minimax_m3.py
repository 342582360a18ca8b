"""MiniMax-M3 for SGLang: one forward pass from token ids to logits, text and images, on CUDA and on the CPU.

Built from SGLang's layers, so parallelism, quantisation and graphs are SGLang's. Shapes: T tokens of a step
on this rank, `hidden` the model's width, `Hq`, `Hkv` and `H` query, kv and index heads of this rank, D the
size of a head. Attention itself is the plugin's (`sglang_m3.attention.backend`), as is the quantisation.

Nothing here reads a device value on the host or keeps state between steps, so every step can be captured in
a CUDA graph. What each checkpoint tensor becomes is in `weight_map.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.eplb.expert_location import ModelConfigForExpertLocation
from sglang.srt.layers.aux_hidden_states import AuxHiddenStateList
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.layers.layer_boundary import (
    append_stages,
    declare_attn,
    declare_ffn,
    is_dense_ffn_fully_dp,
)
from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
from sglang.srt.layers.layernorm import GemmaRMSNorm
from sglang.srt.layers.linear import (
    LinearParallelGroup,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    ReplicatedParallelGroup,
    RowParallelLinear,
)
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import swiglu_no_interleaved_with_alpha_and_limit
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.layers.utils import PPMissingLayer
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.managers.mm_utils import general_mm_embed_routine, pad_mm_tokens
from sglang.srt.managers.schedule_batch import MultimodalDataItem, MultimodalInputs
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, PPProxyTensors
from sglang.srt.model_executor.runner import get_is_capture_mode
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import is_in_breakable_cuda_graph
from sglang.srt.models.utils import WeightsMapper
from sglang.srt.runtime_context import get_parallel, get_stream
from sglang.srt.utils import add_prefix, make_pp_layers
from torch import Tensor, nn

from sglang_m3.config import M3Config
from sglang_m3.experts.recorder import recorder_of
from sglang_m3.models import fusions, joined, loading, vision
from sglang_m3.models.weight_map import checkpoint_weights


class M3MLP(nn.Module):
    """A dense feed-forward network with SwiGLU-OAI: dense layers, and the shared expert of the others.

    `[T, hidden]` to this rank's part of the sum over ranks, `[T, hidden]`; the layer's boundary adds up.
    """

    def __init__(
        self,
        config: M3Config,
        inner: int,
        quant_config: QuantizationConfig | None,
        prefix: str,
        parallel_group: LinearParallelGroup = "tp",
    ) -> None:
        super().__init__()
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [inner] * 2,
            bias=False,
            quant_config=quant_config,
            prefix=add_prefix("gate_up_proj", prefix),
            parallel_group=parallel_group,
        )
        self.down_proj = RowParallelLinear(
            inner,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            reduce_results=False,
            prefix=add_prefix("down_proj", prefix),
            parallel_group=parallel_group,
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate_up, _ = self.gate_up_proj(hidden_states)
        activated = swiglu_no_interleaved_with_alpha_and_limit(gate_up, self.alpha, self.limit)
        return self.down_proj(activated)[0]


class M3MoE(nn.Module):
    """Routed experts, and one shared expert that every token takes.

    A token's experts have the largest `sigmoid(logit) + bias`; their weights are the sigmoids without the
    bias, normalised to sum to `routed_scaling_factor`. `[T, hidden]` to this rank's part of the sum.
    """

    def __init__(
        self, config: M3Config, layer_id: int, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        experts, hidden = config.num_local_experts, config.hidden_size
        # SGLang's option, on by default on CUDA: bfloat16 operands, float32 sums and logits.
        self.bfloat16_router = envs.SGLANG_OPT_USE_BF16_ROUTER_GEMM.get()
        self.gate = ReplicatedLinear(
            hidden,
            experts,
            bias=False,
            params_dtype=torch.bfloat16 if self.bfloat16_router else torch.float32,
            quant_config=None,
            prefix=add_prefix("gate", prefix),
        )
        self.e_score_correction_bias = nn.Parameter(torch.empty(experts, dtype=torch.float32))
        self.experts = FusedMoE(
            num_experts=experts,
            top_k=config.num_experts_per_tok,
            hidden_size=hidden,
            intermediate_size=config.intermediate_size,
            layer_id=layer_id,
            quant_config=quant_config,
            prefix=add_prefix("experts", prefix),
            # How SGLang spells SwiGLU-OAI with the gate half first.
            activation="silu",
            gemm1_alpha=config.swiglu_alpha,
            gemm1_beta=1.0,
            gemm1_clamp_limit=config.swiglu_limit,
            gate_up_interleaved=False,
            # The shared expert reads the same input, in a graph at the same time.
            inplace=False,
        )
        # Marks M3's layers for `platforms.cpu_experts`.
        self.experts._minimax_activation = "swigluoai"
        self.topk = TopK(
            top_k=config.num_experts_per_tok,
            renormalize=True,
            layer_id=layer_id,
            scoring_func="sigmoid",
            correction_bias=self.e_score_correction_bias,
            routed_scaling_factor=config.routed_scaling_factor,
            apply_routed_scaling_factor_on_output=True,
        )
        self.topk.bind_runner_backend(self.experts.runner_backend)
        self.shared_experts = M3MLP(
            config,
            config.shared_intermediate_size,
            quant_config,
            add_prefix("shared_experts", prefix),
        )
        self.other_stream = get_stream("alt") if self.gate.weight.is_cuda else None
        self.layer_id = layer_id
        self.recorder = recorder_of(layer_id)

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.other_stream is None or not get_is_capture_mode() or is_in_breakable_cuda_graph():
            return self.routed(hidden_states) + self.shared_experts(hidden_states)
        # In a decode graph both are too small for the whole GPU, so they run side by side.
        current = torch.cuda.current_stream()
        self.other_stream.wait_stream(current)
        shared = self.shared_experts(hidden_states)
        with torch.cuda.stream(self.other_stream):
            routed = self.routed(hidden_states)
        current.wait_stream(self.other_stream)
        return routed + shared

    def routed(self, hidden_states: Tensor) -> Tensor:
        chosen = self.topk(hidden_states, self.router_logits(hidden_states))
        if self.recorder is not None:
            self.recorder.record(self.layer_id, chosen.topk_ids, self.gate.output_size)
        return self.experts(hidden_states, chosen)

    def router_logits(self, hidden_states: Tensor) -> Tensor:
        """`[T, experts]` float32."""
        if self.bfloat16_router:
            return fusions.router_logits(hidden_states, self.gate.weight)
        return self.gate(hidden_states.float())[0]


class M3Attention(nn.Module):
    """Grouped-query attention over every visible token, or over the blocks that the index branch chooses.

    Queries and keys are normalised per head and the first `rotary_dim` elements of each head rotated; so are
    index queries (one head per kv head) and the index key (one head). The backend chooses blocks by the index
    tensors. `[T, hidden]` to this rank's part of the sum over attention's ranks.
    """

    def __init__(
        self, config: M3Config, layer_id: int, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        ranks = get_parallel().attn_tp_size
        hidden, self.head_dim = config.hidden_size, config.head_dim
        q_heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        norm = partial(GemmaRMSNorm, self.head_dim, eps=config.rms_norm_eps)
        self.qkv_proj = QKVParallelLinear(
            hidden,
            self.head_dim,
            q_heads,
            kv_heads,
            bias=False,
            quant_config=quant_config,
            parallel_group="attn_tp",
            prefix=add_prefix("qkv_proj", prefix),
        )
        self.o_proj = RowParallelLinear(
            q_heads * self.head_dim,
            hidden,
            bias=False,
            reduce_results=False,
            quant_config=quant_config,
            parallel_group="attn_tp",
            prefix=add_prefix("o_proj", prefix),
        )
        self.q_heads, self.kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.q_norm, self.k_norm = norm(), norm()
        self.main_heads = [(self.q_norm, self.q_heads), (self.k_norm, self.kv_heads), (None, self.kv_heads)]
        self.rotary_emb = get_rope(
            self.head_dim,
            rotary_dim=config.rope.rotary_dim,
            max_position=config.max_position_embeddings,
            base=config.rope.theta,
            rope_scaling=config.rope.sglang_parameters(self.head_dim),
        )
        self.attn = RadixAttention(
            self.q_heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=self.kv_heads,
            layer_id=layer_id,
            quant_config=quant_config,
            prefix=add_prefix("attn", prefix),
        )
        self.sparse = layer_id in config.sparse_layers
        if self.sparse:
            # Ranks that share a kv head share its index head; all have the one index key.
            self.index_qkv_proj = QKVParallelLinear(
                hidden,
                self.head_dim,
                kv_heads,
                total_num_kv_heads=1,
                v_head_size=0,
                bias=False,
                quant_config=quant_config,
                parallel_group=ReplicatedParallelGroup("attn_tp", max(1, ranks // kv_heads)),
                prefix=add_prefix("index_qkv_proj", prefix),
            )
            self.index_q_norm, self.index_k_norm = norm(), norm()
            self.index_heads = [(self.index_q_norm, self.index_qkv_proj.num_heads), (self.index_k_norm, 1)]
            joined.lay_together(self.qkv_proj, self.index_qkv_proj)
        self.fused = fusions.norm_and_rotate_is_fused(self.qkv_proj.weight, self.head_dim, self.rotary_emb)

    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: ForwardBatch) -> Tensor:
        if not self.sparse:
            qkv, _ = self.qkv_proj(hidden_states)
            q, k, v = self.heads(positions, qkv, self.main_heads)
            out = self.attn(q.flatten(1), k.flatten(1), v.flatten(1), forward_batch)
        else:
            projected = joined.project(self.qkv_proj, self.index_qkv_proj, hidden_states)
            heads = (
                [self.main_heads + self.index_heads]
                if len(projected) == 1
                else [self.main_heads, self.index_heads]
            )
            q, k, v, idx_q, idx_k = (
                head for part, runs in zip(projected, heads) for head in self.heads(positions, part, runs)
            )
            _, out = self.attn(q, k, v, forward_batch, idx_q=idx_q, idx_k=idx_k, idx_v=None)
        return self.o_proj(out)[0]

    def heads(
        self, positions: Tensor, projected: Tensor, runs: list[tuple[GemmaRMSNorm | None, int]]
    ) -> list[Tensor]:
        """Split `[T, heads * D]` into runs `[T, count, D]`; those with a norm, queries before their keys, are
        normalised and rotated, values stay as they are."""
        if self.fused:
            fusions.norm_and_rotate(projected, runs, self.rotary_emb, positions)
        parts = list(projected.unflatten(-1, (-1, self.head_dim)).split([count for _, count in runs], dim=1))
        if self.fused:
            return parts
        normed = [number for number, (norm, _) in enumerate(runs) if norm is not None]
        for query, key in zip(normed[::2], normed[1::2]):
            q, k = (runs[number][0](parts[number]).flatten(1) for number in (query, key))
            q, k = self.rotary_emb(positions, q, k)
            parts[query], parts[key] = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k))
        return parts


class M3DecoderLayer(nn.Module):
    """Attention and a feed-forward network, each before a norm and added to the residual.

    SGLang's stage boundaries carry the residual from one half to the next: they add up what ranks owe each
    other, spread or gather tokens for data-parallel attention, and apply the norm, fused where possible.
    """

    def __init__(
        self, config: M3Config, layer_id: int, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        norm = partial(GemmaRMSNorm, config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = M3Attention(config, layer_id, quant_config, add_prefix("self_attn", prefix))
        if layer_id in config.moe_layers:
            self.mlp = M3MoE(config, layer_id, quant_config, add_prefix("mlp", prefix))
        else:
            self.mlp = M3MLP(
                config,
                config.dense_intermediate_size,
                quant_config,
                add_prefix("mlp", prefix),
                "replicated" if is_dense_ffn_fully_dp() else "tp",
            )
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        attention, feed_forward = self.stages(config, layer_id)
        options = fusions.boundary_options(config.hidden_size)
        self.attn_boundary, self.ffn_boundary = append_stages(
            (attention, self.input_layernorm, options),
            (feed_forward, self.post_attention_layernorm, options),
        )

    @staticmethod
    def stages(config: M3Config, layer_id: int) -> tuple[Any, Any]:
        """What the layer declares to its neighbours, which other pipeline ranks must know as well."""
        return declare_attn(), declare_ffn(sparse=layer_id in config.moe_layers)

    def forward(
        self,
        positions: Tensor,
        hidden_states: Any,
        forward_batch: ForwardBatch,
        captured: AuxHiddenStateList | None,
    ) -> Any:
        """`hidden_states` is what the layer before handed over, to be read by a boundary only.

        Args:
            captured: takes the layer's input, residual included; None: nobody asked for it.
        """
        hidden_states = self.attn_boundary.prepare(hidden_states, forward_batch, capture_gathered=captured)
        # With data-parallel attention a rank may have no tokens of its own.
        if hidden_states.shape[0] != 0:
            hidden_states = self.self_attn(positions, hidden_states, forward_batch)
        hidden_states = self.attn_boundary.finish(hidden_states, forward_batch)
        hidden_states = self.ffn_boundary.prepare(hidden_states, forward_batch)
        with self.ffn_boundary.exit(forward_batch) as end:
            if hidden_states.shape[0] != 0:
                hidden_states = self.mlp(hidden_states)
        return end.finish(hidden_states)


class M3Model(nn.Module):
    """Embedding, this pipeline stage's layers, final norm."""

    def __init__(self, config: M3Config, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.pp_group = get_parallel().pp_group
        self.embed_tokens: nn.Module = PPMissingLayer()
        self.norm: nn.Module = PPMissingLayer(return_tuple=True)
        if self.pp_group.is_first_rank:
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                use_attn_tp_group=is_dp_attention_enabled(),
                prefix=add_prefix("embed_tokens", prefix),
            )
        self.layers, self.start_layer, self.end_layer = make_pp_layers(
            config.num_hidden_layers,
            lambda idx, prefix: M3DecoderLayer(config, idx, quant_config, prefix),
            prefix=add_prefix("layers", prefix),
            stage_facts=partial(M3DecoderLayer.stages, config),
        )
        if self.pp_group.is_last_rank:
            self.norm = GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers_to_capture: tuple[int, ...] = ()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        forward_batch: ForwardBatch,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: PPProxyTensors | None = None,
    ) -> Tensor | PPProxyTensors | tuple[Tensor, AuxHiddenStateList]:
        """Normalised hidden states `[T, hidden]`, with what `layers_to_capture` asked for if anything.

        On all but the last pipeline rank, what the next one needs.
        """
        if self.pp_group.is_first_rank:
            hidden_states = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
            residual_batch.start(forward_batch)
        else:
            assert pp_proxy_tensors is not None
            boundary = self.layers[self.start_layer].attn_boundary
            hidden_states = boundary.from_pp(pp_proxy_tensors, forward_batch)
        captured = AuxHiddenStateList()
        for index in range(self.start_layer, self.end_layer):
            wanted = captured if index in self.layers_to_capture else None
            hidden_states = self.layers[index](positions, hidden_states, forward_batch, wanted)
        if not self.pp_group.is_last_rank:
            return residual_batch.to_pp(hidden_states, forward_batch)
        wanted = captured.capture if self.end_layer in self.layers_to_capture else None
        hidden_states = residual_batch.final_norm(
            hidden_states, forward_batch, self.norm, capture=wanted, skip_empty=True
        )
        return (hidden_states, captured) if len(captured) > 0 else hidden_states


class MiniMaxM3SparseForCausalLM(nn.Module):
    """The language model. SGLang's interface of a model; the names are SGLang's."""

    hf_to_sglang_mapper = WeightsMapper(orig_to_new_substr={".block_sparse_moe.": ".mlp."})
    packed_modules_mapping = {  # noqa: RUF012
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "index_qkv_proj": ["index_q_proj", "index_k_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    fall_back_to_pt_during_load = False
    unloaded_parameters: tuple[str, ...] = ()
    """Parameters that no checkpoint tensor fills."""

    def __init__(self, config: Any, quant_config: QuantizationConfig | None = None, prefix: str = "") -> None:
        super().__init__()
        self.config, self.quant_config = config, quant_config
        self.m3_config = M3Config.read(config)
        self.pp_group = get_parallel().pp_group
        self.model = M3Model(self.m3_config, quant_config, add_prefix("model", prefix))
        self.lm_head: nn.Module = PPMissingLayer()
        if self.pp_group.is_last_rank:
            self.lm_head = ParallelLMHead(
                self.m3_config.vocab_size,
                self.m3_config.hidden_size,
                quant_config=quant_config,
                prefix=add_prefix("lm_head", prefix),
                use_attn_tp_group=get_parallel().enable_dp_lm_head,
            )
        self.logits_processor = LogitsProcessor(getattr(config, "text_config", config))
        self.capture_aux_hidden_states = False
        self.weights_are_in_place = False

    @property
    def start_layer(self) -> int:
        return self.model.start_layer

    @property
    def end_layer(self) -> int:
        return self.model.end_layer

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: PPProxyTensors | None = None,
    ) -> Any:
        """SGLang's logits output; on all but the last pipeline rank, what the next one needs.

        Args:
            input_ids: `[T]`; not read with `input_embeds`.
            positions: `[T]`, absolute.
            input_embeds: `[T, hidden]` in place of the tokens' embeddings, in whatever float dtype.
        """
        if input_embeds is not None:
            input_embeds = input_embeds.to(self.model.embed_tokens.weight.dtype)
        hidden_states = self.hidden_states(
            input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors
        )
        if not self.pp_group.is_last_rank:
            return hidden_states
        captured = None
        if isinstance(hidden_states, tuple):
            hidden_states, captured = hidden_states
        return self.logits_processor(input_ids, hidden_states, self.lm_head, forward_batch, captured)

    def hidden_states(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
        input_embeds: Tensor | None,
        pp_proxy_tensors: PPProxyTensors | None,
    ) -> Any:
        """See `M3Model.forward`."""
        return self.model(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_embed_and_head(self) -> tuple[Tensor, Tensor]:
        """Weights that a draft model shares."""
        return self.model.embed_tokens.weight, self.lm_head.weight

    def set_eagle3_layers_to_capture(self, layer_ids: list[int] | None = None) -> None:
        """Hand the draft model the outputs of these layers; without a list, EAGLE3's usual three.

        A layer's output is taken where the next layer reads it.
        """
        if not self.pp_group.is_last_rank:
            return
        layers = self.m3_config.num_hidden_layers
        chosen = [2, layers // 2, layers - 3] if layer_ids is None else layer_ids
        assert all(0 <= layer < layers for layer in chosen), f"layers {chosen} of {layers}"
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = tuple(layer + 1 for layer in chosen)

    def precompile_kernels_after_loading(self) -> None:
        fusions.register_all_reduce()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint, or update some of its tensors once one is in place.

        Raises:
            loading.WeightError: names or shapes that do not fit; on the first load, missing ones as well.
        """
        names = checkpoint_weights(self.m3_config)
        parameters = dict(self.named_parameters())
        whole = self.pp_group.world_size == 1
        loading.check_covered(names, parameters, unloaded=self.unloaded_parameters, whole=whole)
        used = loading.load(names, parameters, weights, complete=not self.weights_are_in_place)
        self.weights_are_in_place = True
        return used

    def post_load_weights(self) -> None:
        """SGLang calls this where it filled the parameters itself, without `load_weights`."""
        self.weights_are_in_place = True

    @classmethod
    def get_model_config_for_expert_location(cls, config: Any) -> ModelConfigForExpertLocation:
        read = M3Config.read(config)
        return ModelConfigForExpertLocation(read.num_hidden_layers, read.num_local_experts)


class MiniMaxM3SparseForConditionalGeneration(MiniMaxM3SparseForCausalLM):
    """The language model with upstream's vision half in front of it."""

    unloaded_parameters = vision.UNUSED_PARAMETERS

    def __init__(self, config: Any, quant_config: QuantizationConfig | None = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, add_prefix("language_model", prefix))
        self.vision_tower = vision.build(config, prefix)

    def pad_input_ids(self, input_ids: array, mm_inputs: MultimodalInputs) -> array:
        return pad_mm_tokens(input_ids, mm_inputs)

    def get_image_feature(self, items: list[MultimodalDataItem]) -> Tensor:
        return vision.image_features(self.vision_tower, items)

    def get_video_feature(self, items: list[MultimodalDataItem]) -> Tensor:
        return vision.video_features(self.vision_tower, items)

    def hidden_states(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
        input_embeds: Tensor | None,
        pp_proxy_tensors: PPProxyTensors | None,
    ) -> Any:
        """See `M3Model.forward`; placeholders of media become the tower's features."""
        if input_embeds is not None:
            return self.model(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        return general_mm_embed_routine(
            input_ids=input_ids,
            forward_batch=forward_batch,
            language_model=self.model,
            multimodal_model=self,
            positions=positions,
            pp_proxy_tensors=pp_proxy_tensors,
        )


EntryClass = [MiniMaxM3SparseForCausalLM, MiniMaxM3SparseForConditionalGeneration]
