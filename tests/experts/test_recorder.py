"""Which experts were taken is written down, one file per step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_m3.experts import recorder as experts


def test_a_step_is_written_when_its_last_layer_is_known(tmp_path: Path) -> None:
    recorder = experts.ExpertRecorder(tmp_path)
    for layer in (1, 2):
        recorder.expect(layer)
    ids = torch.tensor([[3, 1]])
    recorder.record(1, ids, 4)
    assert experts.load(tmp_path) == []
    recorder.record(2, ids + 4, 4)
    ids.zero_()
    (step,) = experts.load(tmp_path)
    assert step.experts == 4
    assert {layer: taken.tolist() for layer, taken in step.taken.items()} == {1: [[3, 1]], 2: [[7, 5]]}


def test_layers_are_known_before_their_first_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_M3_RECORD_BLOCKS", str(tmp_path))
    monkeypatch.setattr(experts, "_recorder", None)
    recorders = {layer: experts.recorder_of(layer) for layer in (3, 4, 5)}
    for step in range(2):
        for layer, recorder in recorders.items():
            assert recorder is not None
            recorder.record(layer, torch.tensor([[layer, step]]), 16)
    steps = experts.load(tmp_path)
    assert [step.experts for step in steps] == [16, 16]
    assert [{layer: ids.tolist() for layer, ids in step.taken.items()} for step in steps] == [
        {layer: [[layer, step]] for layer in (3, 4, 5)} for step in range(2)
    ]


def test_nothing_is_recorded_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_M3_RECORD_BLOCKS", raising=False)
    assert experts.recorder_of(3) is None
