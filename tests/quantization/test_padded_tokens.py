"""Tokens that pad a captured graph cost no expert's work on a rank of expert parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_m3 import hardware
from sglang_m3.models.minimax_m3 import MiniMaxM3SparseForConditionalGeneration
from sglang_m3.quantization import register
from sglang_m3.quantization.config import METHOD, M3MxFp8Config
from sglang_m3.quantization.experts import M3MxFp8ExpertsMethod
from sglang_m3.tiny import build
from tests.models.building import as_rank
from tests.quantization.dummy_use import SHAPE, by_plugin


@pytest.mark.skipif(hardware.target() != "cpu", reason="layers are built for the CPU")
@torch.no_grad()
def test_padding_is_routed_to_no_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, real = 37, 23
    seen = []
    apply = M3MxFp8ExpertsMethod.apply

    def noting(method: M3MxFp8ExpertsMethod, layer: Any, dispatch_output: Any) -> Any:
        seen.append(dispatch_output.topk_output.topk_ids)
        return apply(method, layer, dispatch_output)

    monkeypatch.setattr(M3MxFp8ExpertsMethod, "apply", noting)
    x = torch.randn(tokens, SHAPE.hidden, generator=torch.Generator().manual_seed(2))
    checkpoint = build(tmp_path / "tiny", SHAPE)
    for rank in range(2):
        with as_rank(checkpoint, rank, tp=2, ep=2) as config:
            model = MiniMaxM3SparseForConditionalGeneration(config, quant_config=M3MxFp8Config("plain"))
            by_plugin(model)
            experts = model.model.layers[1].mlp
            experts.experts.block_scales = None
            counts = ForwardContext(attn_backend=None, moe_num_token_non_padded=lambda: torch.tensor(real))
            with forward_context(counts), torch.compiler.set_stance("force_eager"):
                out = experts.routed(x)
        assert not out[real:].any() and out[:real].isfinite().all() and out[:real].any()
    both = torch.stack(seen)
    assert (both[:, real:] == -1).all()
    assert ((both[:, :real] >= 0).sum(0) == 1).all(), "a choice is one rank's"
    assert both.max() == SHAPE.experts // 2 - 1, "ids are the rank's own"


def test_sglangs_quantisations_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: method for name, method in QUANTIZATION_METHODS.items() if name != METHOD}
    monkeypatch.delitem(QUANTIZATION_METHODS, METHOD, raising=False)
    register.register()
    assert before | {METHOD: M3MxFp8Config} == QUANTIZATION_METHODS
    assert "mxfp8" in before, "SGLang's own, which other models use"
