"""Tuning tries divisions that a GPU can run, and writes files that SGLang finds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config as lookup

from bench_serving import tune_experts
from bench_serving.experts_product import (
    SHARED_MEMORY,
    Blocks,
    Division,
    Experts,
    divisions,
    expected_product,
    in_order,
    kernel_of,
)

EP8, EP4 = Experts(16, 3072), Experts(32, 3072)


@pytest.mark.parametrize("experts", [EP8, EP4], ids=["EP8", "EP4"])
@pytest.mark.parametrize("tokens", sorted(tune_experts.TOKENS))
def test_every_step_has_divisions_to_try_and_all_can_run(experts: Experts, tokens: int) -> None:
    tried = list(divisions(experts, tokens))
    assert len(set(tried)) == len(tried) >= 20
    assert {division.descriptor for division in tried} == {False, True}
    for division in tried:
        assert division.shared_memory <= SHARED_MEMORY, division
        for product in ("up", "down"):
            rows, columns = experts.shape(product)
            assert rows % division.columns == columns % division.depth == 0, division
    if experts.rows_each(tokens) <= 8:
        # A weight is read once if an expert's tokens are in one block.
        assert any(division.rows >= experts.rows_each(tokens) for division in tried)


def test_a_kernel_is_compiled_once_for_all_the_steps_that_share_it() -> None:
    division = Division(16, 64, 128, 1, 4, 4)
    assert kernel_of(EP8, "up", division, 16, False) == kernel_of(EP4, "up", division, 512, False)
    assert kernel_of(EP8, "up", division, 512, False) != kernel_of(EP8, "up", division, 513, False)
    # The second product's input has a row for each of a token's four choices.
    assert kernel_of(EP8, "down", division, 128, False).early
    assert not kernel_of(EP8, "down", division, 132, False).early
    assert not kernel_of(EP8, "up", division, 2, False).aligned


def test_what_a_product_has_to_be() -> None:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    ids = torch.tensor([[2, -1], [0, 2], [-1, -1]])
    blocks = Blocks(*[torch.zeros(1)] * 3, ids, random(3, 2))
    x, w13, w2 = random(3, 5), random(3, 8, 5), random(3, 5, 4)
    up = kernel_of(EP8, "up", Division(16, 64, 64, 1, 4, 3), 3, False)
    got = expected_product(up, blocks, x, w13, choices=2)
    want = torch.stack([w13[2] @ x[0], 0 * got[0], w13[0] @ x[1], w13[2] @ x[1], 0 * got[0], 0 * got[0]])
    torch.testing.assert_close(got, want.double(), rtol=1e-5, atol=1e-5)
    down = kernel_of(EP8, "down", Division(16, 64, 64, 1, 4, 3), 3, False)
    hidden = random(6, 4)
    got = expected_product(down, blocks, hidden, w2, choices=2)
    scaled = blocks.weights.flatten()[:, None]
    want = torch.stack([w2[2] @ hidden[0], 0 * got[0], w2[0] @ hidden[2], w2[2] @ hidden[3]]) * scaled[:4]
    torch.testing.assert_close(got[:4], want.double(), rtol=1e-5, atol=1e-5)
    assert not got[4:].any()


def test_rows_are_put_into_the_order_of_blocks_with_zeros_between() -> None:
    rows = torch.arange(1, 4)[:, None].float()
    order = torch.tensor([1, 3, 0, 3, 2, 1 << 30], dtype=torch.int32)
    assert in_order(rows, order).flatten().tolist() == [2, 0, 1, 0, 3, 0]


def result(tokens: int, up: Division | None, down: Division | None) -> dict[str, Any]:
    return {"tokens": tokens, "up": up and up.entry(), "down": down and down.entry()}


def test_sglang_finds_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "get_device_name", lambda *_: "NVIDIA H200")
    running = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
    monkeypatch.setattr(lookup, "get_exec", lambda: running)
    up, down = Division(16, 64, 128, 1, 4, 5), Division(16, 128, 64, 1, 8, 4, descriptor=True)
    results = [result(64, up, down), result(8, None, None)]
    files = tune_experts.write(tmp_path, EP8, results)
    assert [file.name for file in files] == [
        "E=16,N=3072,device_name=NVIDIA_H200.json",
        "E=16,N=3072,device_name=NVIDIA_H200_down.json",
    ]
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(tmp_path))
    find = lookup.get_moe_configs.__wrapped__
    first, second = (find(16, 3072, None, down_moe=which) for which in (False, True))
    assert list(first) == [8, 64] and first[64] == up.entry() and "USE_TMA" not in first[64]
    assert second[64] == down.entry() and second[64]["USE_TMA"] is True
    # Where SGLang's default was the fastest it is written out, for both products alike.
    default = lookup.get_default_config(8, 16, 3072, 6144, 4, None, False)
    assert first[8] == second[8] == default
