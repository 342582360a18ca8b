"""Errors of the MXFP8 experts against float64, for `operators_mxfp8_tune`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import astuple, replace

import torch
from m3_kernels.reference.dequantize_mxfp8 import dequantize_mxfp8
from m3_kernels.reference.mxfp8_experts import mxfp8_experts as reference_experts
from m3_kernels.reference.swiglu_oai import swiglu_oai
from m3_kernels.triton.sm90_mxfp8_experts import ExpertsTile
from m3_kernels.triton.sm90_mxfp8_experts_few import FewExpertsTile
from torch import Tensor

from bench_serving.operators_mxfp8 import ALPHA, LIMIT, Rank, Routing, run_experts, run_grouped

CHECKED_TOKENS = 40
EXACT, FP8 = 6e-3, 0.07
"""Largest relative errors: of bfloat16 rounded three times, and of activations in E4M3."""


def say(**result: object) -> None:
    """One line of JSON."""
    print(json.dumps(result), flush=True)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def rounded(x: Tensor) -> Tensor:
    """E4M3 with one scale per row and 128 columns."""
    groups = x.unflatten(-1, (-1, 128))
    unit = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return ((groups / unit).to(torch.float8_e4m3fn).to(x.dtype) * unit).flatten(-2)


def with_fp8_activations(given: Routing, weights: dict[str, Tensor]) -> Tensor:
    """The layer in float64, but with both products' activations rounded to E4M3."""
    x = rounded(given.x.double())
    out = torch.zeros_like(x)
    for expert in given.ids[given.ids >= 0].unique().tolist():
        token, choice = torch.where(given.ids == expert)
        w13, w2 = (
            dequantize_mxfp8(weights[name][expert], weights[f"{name}_scale"][expert], torch.float64)
            for name in ("w13", "w2")
        )
        hidden = rounded(swiglu_oai(x[token] @ w13.T, alpha=ALPHA, limit=LIMIT))
        out.index_add_(0, token, hidden @ w2.T * given.weights[token, choice].double()[:, None])
    return out


def check_experts(
    rank: Rank,
    weights: dict[str, Tensor],
    blocks: list[tuple[Tensor, Tensor]],
    tiles: Iterable[ExpertsTile | FewExpertsTile],
) -> set[ExpertsTile | FewExpertsTile]:
    """Compare every division, and DeepGEMM's layouts, with float64; returns the divisions that are right."""
    given = Routing.random(CHECKED_TOKENS, rank)
    given = replace(given, x=given.x * 3)  # beyond the limits of SwiGLU-OAI
    want = reference_experts(
        given.x.double(),
        **weights,
        topk_ids=given.ids,
        topk_weights=given.weights,
        alpha=ALPHA,
        limit=LIMIT,
        first_expert=0,
    )
    right = set()
    for tile in tiles:
        try:
            error = relative(run_experts(given, weights, tile), want)
        except Exception as failure:
            say(check=rank.name, tile=astuple(tile), failed=f"{type(failure).__name__}: {failure}"[:300])
            continue
        if error < EXACT:
            right.add(tile)
        else:
            say(check=rank.name, tile=astuple(tile), error=error, ok=False)
    say(check=rank.name, how="weight-only", right=len(right))
    alone = relative(with_fp8_activations(given, weights), want)
    error = relative(run_grouped(given, blocks), want)
    say(check=rank.name, how="DeepGEMM", error=error, fp8_activations_alone=alone, ok=error < FP8)
    many = Routing.random(4500, rank)
    exact, fast = run_experts(many, weights), run_grouped(many, blocks)
    say(check=rank.name, how="DeepGEMM, 4,500 tokens", error=relative(fast, exact))
    return right
