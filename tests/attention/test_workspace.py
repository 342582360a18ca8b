"""The operators' scratch memory is left out of what SGLang fills with its KV pool."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_m3.attention import workspace
from sglang_m3.attention.workspace import StepShape, around_profile_available_bytes, bytes_needed

SHAPE = StepShape(
    rows=8192,
    requests=48,
    blocks=8192,
    pages=9000,
    q_heads=8,
    kv_heads=1,
    index_heads=1,
    head_dim=128,
    topk=16,
)
FREE = 20 << 30


@pytest.mark.parametrize("max_running_requests", [48, None])
def test_the_kv_budget_is_what_the_workspaces_leave(
    monkeypatch: pytest.MonkeyPatch, max_running_requests: int | None
) -> None:
    asked: dict[str, int] = {}

    def shape_of(config: object, server_args: object, **sizes: int) -> StepShape:
        asked.update(sizes)
        return SHAPE

    monkeypatch.setattr(workspace, "serves", lambda config: True)
    monkeypatch.setattr(workspace, "resolving_view", lambda server_args: server_args)
    monkeypatch.setattr(workspace.StepShape, "of", shape_of)
    configurator = SimpleNamespace(
        device="cuda",
        model_config=SimpleNamespace(head_dim=128),
        server_args=SimpleNamespace(max_running_requests=max_running_requests),
    )
    left = around_profile_available_bytes(lambda configurator: FREE, configurator)
    assert left == FREE - sum(bytes_needed(SHAPE)) < FREE - (64 << 20)
    assert asked["requests"] == (max_running_requests or workspace.MOST_REQUESTS)
    # A token of one kv head takes 512 bytes of keys and values in BF16: no pool has more pages.
    assert asked["pages"] >= FREE // (128 * 512)


@pytest.mark.parametrize(("device", "ours"), [("cpu", True), ("cuda", False)])
def test_other_models_and_the_cpu_keep_their_budget(
    monkeypatch: pytest.MonkeyPatch, device: str, ours: bool
) -> None:
    monkeypatch.setattr(workspace, "serves", lambda config: ours)
    configurator = SimpleNamespace(device=device, model_config=None)
    assert around_profile_available_bytes(lambda configurator: FREE, configurator) == FREE
