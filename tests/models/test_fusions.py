"""The fused normalisation and rotation against its definition, head by head, on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_m3.models.fusions import FUSED_HEAD_DIM, FUSED_ROTARY_DIM, norm_and_rotate
from tests.kernels.sm90 import REAL

EPSILON = 1e-6


@pytest.mark.skipif(not REAL, reason="needs an sm90 GPU")
@pytest.mark.parametrize(
    "lengths",
    # Lengths of runs; those with False are left alone, as values are.
    [[(8, True), (1, True), (1, False), (1, True), (1, True)], [(64, True), (4, True), (4, False)]],
    ids=["a rank of eight with its index heads", "a dense layer of one rank"],
)
@pytest.mark.parametrize("tokens", [1, 37])
def test_runs_of_heads_are_normalised_and_rotated_where_they_lie(
    lengths: list[tuple[int, bool]], tokens: int
) -> None:
    torch.manual_seed(4)
    half = FUSED_ROTARY_DIM // 2
    heads = sum(length for length, _ in lengths)
    projected = torch.randn(tokens, heads * FUSED_HEAD_DIM, device="cuda").mul(3).bfloat16()
    angle = torch.arange(500, device="cuda")[:, None] / 10_000 ** (torch.arange(half, device="cuda") / half)
    rotary = SimpleNamespace(cos_sin_cache=torch.cat([angle.cos(), angle.sin()], 1).float().contiguous())
    positions = torch.randint(0, 500, (tokens,), device="cuda")
    norms = [
        SimpleNamespace(
            weight=torch.randn(FUSED_HEAD_DIM, device="cuda").bfloat16(), variance_epsilon=EPSILON
        )
        if has
        else None
        for _, has in lengths
    ]
    want = projected.float().unflatten(1, (heads, FUSED_HEAD_DIM)).clone()
    begin = 0
    for (length, has), norm in zip(lengths, norms):
        if has:
            run = want[:, begin : begin + length]
            run = run * (run.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * (1 + norm.weight.float())
            cos, sin = (table[positions][:, None] for table in (angle.cos(), angle.sin()))
            first, second = run[..., :half], run[..., half:FUSED_ROTARY_DIM]
            turned = [first * cos - second * sin, second * cos + first * sin]
            want[:, begin : begin + length] = torch.cat([*turned, run[..., FUSED_ROTARY_DIM:]], -1)
        begin += length
    runs = [(norm, length) for norm, (length, _) in zip(norms, lengths)]
    norm_and_rotate(projected, runs, rotary, positions)
    got = projected.float().unflatten(1, (heads, FUSED_HEAD_DIM))
    for head in range(heads):
        torch.testing.assert_close(
            got[:, head],
            want[:, head],
            atol=2e-2,
            rtol=2e-2,
            msg=lambda text, head=head: f"head {head}: {text}",
        )
