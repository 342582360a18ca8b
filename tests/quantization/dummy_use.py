"""What a model with dummy weights does: distinct blocks that its layers choose, and experts that they take.

    python -m tests.quantization.dummy_use

On the CPU, a small M3 in MXFP8 reads one prompt, filled by the plugin and by SGLang's dummy loader. Prints a
Markdown table.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from m3_kernels import BLOCK_TOKENS, Rows, plan_prefix, score_blocks, select_blocks
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_loader.weight_utils import initialize_dummy_weights
from torch import Tensor
from torch.nn import functional

from sglang_m3.models.minimax_m3 import MiniMaxM3SparseForConditionalGeneration
from sglang_m3.quantization.config import M3MxFp8Config
from sglang_m3.quantization.dummy import around_initialize_dummy_weights
from sglang_m3.quantization.experts import M3MxFp8ExpertsMethod
from sglang_m3.tiny import TinyConfig, build
from tests.models.building import as_rank

TOKENS, TOPK_BLOCKS = 1600, 4
SHAPE = TinyConfig(vocab=512, vision_layers=1, experts=16)


@dataclass(frozen=True)
class Use:
    """What one sparse layer did with a prompt.

    Attributes:
        blocks: distinct blocks chosen beyond each token's own.
        selections: distinct sets of blocks, over tokens and index heads.
        experts: that some token took.
        tied: part of the tokens whose scores of the visible blocks are all equal, where there are several.
    """

    blocks: int
    selections: int
    experts: int
    tied: float


class Observer:
    """Attention of one prompt to itself, in place of SGLang's backends; notes what every layer chooses."""

    def __init__(self) -> None:
        self.chosen: dict[int, tuple[int, int, float]] = {}
        self.experts: dict[int, int] = {}

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool, **index: Any
    ) -> Any:
        heads = [part.view(TOKENS, -1, layer.head_dim).transpose(0, 1) for part in (q, k, v)]
        out = functional.scaled_dot_product_attention(
            *heads, is_causal=True, scale=layer.scaling, enable_gqa=True
        )
        out = out.transpose(0, 1).flatten(1)
        if not index:
            return out
        self._choose(layer.layer_id, index["idx_q"], index["idx_k"])
        return None, out

    def _choose(self, layer: int, index_q: Tensor, index_k: Tensor) -> None:
        pages = -(-TOKENS // BLOCK_TOKENS)
        keys = functional.pad(index_k, (0, 0, 0, 0, 0, pages * BLOCK_TOKENS - TOKENS))
        keys = keys.view(pages, BLOCK_TOKENS, 1, -1)
        table = torch.arange(pages, dtype=torch.int32)[None]
        rows = Rows(torch.zeros(TOKENS, dtype=torch.int32), torch.arange(TOKENS, dtype=torch.int32))
        workspace = torch.empty(0, dtype=torch.uint8)
        plan = plan_prefix(table, rows, workspace=workspace)
        scores = torch.empty(index_q.shape[1], TOKENS, pages)
        score_blocks(index_q, keys, table, rows, plan, out=scores)
        chosen = torch.empty(index_q.shape[1], TOKENS, TOPK_BLOCKS, dtype=torch.int32)
        select_blocks(scores, rows, topk=TOPK_BLOCKS, init_blocks=0, local_blocks=1, out=chosen)
        own = (rows.position // BLOCK_TOKENS)[None, :, None]
        several = scores[:, 2 * BLOCK_TOKENS :]
        largest = several.amax(-1)
        smallest = several.masked_fill(several == -torch.inf, torch.inf).amin(-1)
        tied = ~(largest > smallest)  # NaN counts
        self.chosen[layer] = (
            len(chosen[(chosen >= 0) & (chosen != own)].unique()),
            len(chosen.flatten(0, 1).unique(dim=0)),
            float(tied.float().mean()),
        )


def use_of(fill: Callable[[torch.nn.Module], None], checkpoint: Path) -> dict[int, Use]:
    """Sparse layer -> what it did, in a model of `checkpoint`'s config whose weights `fill` made."""
    observer = Observer()
    apply = M3MxFp8ExpertsMethod.apply

    def noting(method: M3MxFp8ExpertsMethod, layer: Any, dispatch_output: Any) -> Any:
        observer.experts[layer.layer_id] = len(dispatch_output.topk_output.topk_ids.unique())
        return apply(method, layer, dispatch_output)

    with as_rank(checkpoint, dtype="float32") as config, torch.no_grad():
        model = MiniMaxM3SparseForConditionalGeneration(config, quant_config=M3MxFp8Config("plain"))
        fill(model)
        positions = torch.arange(TOKENS)
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            input_ids=torch.randint(500, (TOKENS,), generator=torch.Generator().manual_seed(1)),
            req_pool_indices=torch.ones(1, dtype=torch.long),
            seq_lens=torch.tensor([TOKENS]),
            out_cache_loc=positions,
            seq_lens_sum=TOKENS,
            positions=positions,
            extend_seq_lens=torch.tensor([TOKENS]),
            extend_seq_lens_cpu=[TOKENS],
            extend_prefix_lens_cpu=[0],
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        context = forward_context(ForwardContext(attn_backend=observer), forward_batch=batch)
        with mock.patch.object(M3MxFp8ExpertsMethod, "apply", noting), context:
            for module in model.modules():
                module.weight_block_scale = module.block_scales = None  # the layout `exact`
            with torch.compiler.set_stance("force_eager"):
                model(batch.input_ids, positions, batch)
    return {
        layer: Use(*found[:2], observer.experts[layer], found[2]) for layer, found in observer.chosen.items()
    }


def by_plugin(model: torch.nn.Module) -> None:
    around_initialize_dummy_weights(initialize_dummy_weights, model)


def by_sglang(model: torch.nn.Module) -> None:
    for tensor in model.state_dict().values():
        tensor.zero_()
    initialize_dummy_weights(model)


def main() -> None:
    checkpoint = build(Path(tempfile.mkdtemp()) / "tiny", SHAPE)
    print("| filled by | layer | distinct blocks chosen | selections | experts touched | tokens all tied |")
    print("|---|---|---|---|---|---|")
    for name, fill in (("the plugin", by_plugin), ("SGLang", by_sglang)):
        for layer, use in use_of(fill, checkpoint).items():
            print(
                f"| {name} | {layer} | {use.blocks} of {TOKENS // BLOCK_TOKENS} | {use.selections:,} "
                f"| {use.experts} of {SHAPE.experts} | {100 * use.tied:.0f}% |"
            )


if __name__ == "__main__":
    main()
