"""The operators' clock on a stand-in for the GPU: what is captured, what is timed, what comes out."""

from __future__ import annotations

import contextlib
import importlib
import types
from pathlib import Path

import pytest
import torch

import bench_serving
from bench_serving.graph_time import time_us


class StandIn:
    """Takes the place of `torch.cuda`; every replay takes the next of `durations`, in milliseconds."""

    def __init__(self, durations: list[float]) -> None:
        self.durations, self.clock = list(durations), 0.0
        self.log: list[object] = []
        self.capturing = False

    def cuda(self) -> types.SimpleNamespace:
        stand_in = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = stand_in.clock

            def elapsed_time(self, other: Event) -> float:
                return other.at - self.at

        class CUDAGraph:
            def capture_begin(self) -> None:
                stand_in.capturing = True

            def capture_end(self) -> None:
                stand_in.capturing = False
                stand_in.log.append("captured")

            def replay(self) -> None:
                assert not stand_in.capturing
                stand_in.log.append("replay")
                stand_in.clock += stand_in.durations.pop(0)

        stream = types.SimpleNamespace(wait_stream=lambda other: None)
        return types.SimpleNamespace(
            Event=Event,
            CUDAGraph=CUDAGraph,
            Stream=lambda: stream,
            current_stream=lambda: stream,
            stream=lambda _: contextlib.nullcontext(),
            synchronize=lambda: None,
        )


def on_stand_in(monkeypatch: pytest.MonkeyPatch, durations: list[float]) -> StandIn:
    stand_in = StandIn(durations)
    monkeypatch.setattr(torch, "cuda", stand_in.cuda())
    return stand_in


def test_the_median_replay_is_divided_by_the_layers_and_the_first_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_stand_in(monkeypatch, [900.0, 6.0, 3.0, 600.0, 4.5, 0.3])
    us = time_us(lambda layer: None, "abc", 5)
    assert us == pytest.approx(1500.0), "4.5 ms for three layers is the median of the five after the first"


def test_every_layer_runs_once_before_the_capture_and_once_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = on_stand_in(monkeypatch, [1.0] * 3)
    time_us(lambda layer: stand_in.log.append((layer, stand_in.capturing)), ["a", "b"], 2)
    expected = [("a", False), ("b", False), ("a", True), ("b", True), "captured", *["replay"] * 3]
    assert stand_in.log == expected, f"did {stand_in.log}"


def test_a_first_replay_that_took_long_enough_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = on_stand_in(monkeypatch, [1.0, 2.0, 1.0, 1.0])
    assert time_us(lambda layer: None, [None], 3, enough=1999.0) == pytest.approx(2000.0)
    assert stand_in.log.count("replay") == 2
    stand_in = on_stand_in(monkeypatch, [1.0, 2.0, 5.0, 1.0])
    assert time_us(lambda layer: None, [None], 3, enough=2001.0) == pytest.approx(2000.0)
    assert stand_in.log.count("replay") == 4, "a later replay that takes longer ends nothing"


def test_a_capture_ends_although_a_layer_fails_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = on_stand_in(monkeypatch, [1.0])

    def run(layer: str) -> None:
        if stand_in.capturing:
            raise RuntimeError("cannot be captured")

    with pytest.raises(RuntimeError, match="cannot be captured"):
        time_us(run, ["a"])
    assert stand_in.log == ["captured"]


@pytest.mark.parametrize(
    "name", ["operators_selection", "operators_attention", "operators_million", "operators_experts"]
)
def test_the_benches_share_this_clock(name: str) -> None:
    assert importlib.import_module(f"bench_serving.{name}").time_us is time_us


def test_no_bench_has_a_graph_clock_of_its_own() -> None:
    folder = Path(bench_serving.__file__).parent
    makers = sorted(path.name for path in folder.glob("*.py") if "CUDAGraph" in path.read_text())
    assert makers == ["graph_time.py"]


def test_mxfp8_layers_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench_serving import operators_mxfp8

    stand_in = on_stand_in(monkeypatch, [1.0, 6.0])
    assert operators_mxfp8.time_us(stand_in.log.append, 3, 1) == pytest.approx(2000.0)
    assert stand_in.log[:3] == [0, 1, 2]
