"""A comparison measures every point once, in a fair order, and goes on where it stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench_serving import client, compare, measure
from bench_serving.compare import Comparison, Result
from bench_serving.corpus import RandomCorpus, TextCorpus
from bench_serving.server import Variant
from bench_serving.sessions import Session
from bench_serving.store import OUTPUTS, POINTS, Store
from bench_serving.workload import PrefixLevel, Traffic, Workload
from tests.bench_serving.conftest import Machine

KIND = Traffic(input_tokens=(4, 9), output_tokens=(2, 5))
LOAD = Workload(
    "small", "Small.", (1, 2), (KIND,), (PrefixLevel(300),), requests_per_slot=1, least_sessions=2
)
ONE, TWO = (Variant(name, (), ("--model-path", "m")) for name in ("one", "two"))
CORPUS = RandomCorpus(500)


def compared(store: Store, **changed: object) -> Result:
    options = {"variants": (ONE, TWO), "workloads": (LOAD,), "repeats": 1, "rounds": 1, "seed": 0} | changed
    return compare.run(Comparison(**options), CORPUS, store)


def run(store: Store, **changed: object) -> bool:
    """Whether nothing is missing."""
    result = compared(store, **changed)
    assert result.broken == {}
    return not result.missing


def test_every_other_round_goes_backwards(machine: Machine, tmp_path: Path) -> None:
    assert run(Store(tmp_path), rounds=2)
    assert machine.order == ["+one", "-one", "+two", "-two", "+two", "-two", "+one", "-one"]
    assert machine.logs == ["one.log", "two.log", "two-round-2.log", "one-round-2.log"]
    points = Store(tmp_path).points()
    assert [(point["variant"], point["round"], point["max_concurrency"]) for point in points] == [
        (variant, number, concurrency)
        for number, variants in enumerate((("one", "two"), ("two", "one")))
        for variant in variants
        for concurrency in (1, 2)
    ]


def test_together_alternates_at_every_point(machine: Machine, tmp_path: Path) -> None:
    assert run(Store(tmp_path), together=True, repeats=2)
    assert machine.order == ["+one", "+two", "-two", "-one"]
    points = Store(tmp_path).points()
    assert [point["variant"] for point in points] == ["one", "two"] * 4


def test_variants_are_asked_the_same_and_no_point_finds_private_text_in_the_cache(
    machine: Machine, tmp_path: Path
) -> None:
    assert run(Store(tmp_path), repeats=2)
    one, two = (fake.prompts for fake in machine.servers)
    assert sorted(one) == sorted(two)
    for point in Store(tmp_path).points():
        # 300 tokens of prefix hold two whole pages.
        assert point["cached_tokens"] == 256 * point["requests"]
        assert point["failed"] == 0 and point["overlap"] == pytest.approx(point["cached_share"])


def test_what_is_measured_is_not_measured_again(machine: Machine, tmp_path: Path) -> None:
    assert run(Store(tmp_path))
    lines = (tmp_path / "points.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "points.jsonl").write_text("".join(lines[:3]))
    machine.order.clear()
    assert run(Store(tmp_path))
    assert machine.order == ["+two", "-two"]
    assert len(Store(tmp_path).points()) == 4
    machine.order.clear()
    assert run(Store(tmp_path))
    assert machine.order == []


def test_it_stops_in_time_and_says_that_something_is_missing(machine: Machine, tmp_path: Path) -> None:
    result = compared(Store(tmp_path), stop_after_seconds=0.0)
    assert result.missing == tuple(f"{name}: small at {at}" for name in ("one", "two") for at in (1, 2))
    assert Store(tmp_path).points() == []
    assert run(Store(tmp_path))


def test_after_an_interruption_what_is_missing_is_measured(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = measure.measure, []

    def interrupted(*given: object, **named: object) -> object:
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*given, **named)

    monkeypatch.setattr(compare, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(Store(tmp_path))
    # The server is stopped on the way out.
    assert machine.order == ["+one", "-one"]
    # A process that is killed while it writes leaves half a line.
    for name in (POINTS, OUTPUTS):
        with (tmp_path / name).open("a") as file:
            file.write('{"variant": "one", "wor')
    assert run(Store(tmp_path))
    points = Store(tmp_path).points()
    assert [(point["variant"], point["max_concurrency"]) for point in points] == [
        ("one", 1), ("one", 2), ("two", 1), ("two", 2),
    ]  # fmt: skip
    assert len(Store(tmp_path).outputs()) == 4


def test_failures_while_measuring_are_in_the_point(machine: Machine, tmp_path: Path) -> None:
    # The prefix, two requests to warm up, then the point's second.
    machine.fault = lambda number: "http" if number == 4 else None
    result = compared(Store(tmp_path), variants=(ONE,))
    assert (result.missing, result.failed, result.broken) == ((), {"one": 1}, {})
    first, second = Store(tmp_path).points()
    assert (first["requests"], first["failed"], second["failed"]) == (2, 1, 0)
    assert first["completed"] == 1 and list(first["errors"].values()) == [1]
    # Measured again, it is served.
    machine.fault = lambda number: None
    assert compared(Store(tmp_path), variants=(ONE,)) == Result((), {}, {})


def test_a_variant_that_breaks_leaves_the_others(machine: Machine, tmp_path: Path) -> None:
    machine.fault = lambda number: "http" if machine.order == ["+one"] else None
    result = compared(Store(tmp_path))
    assert result.broken.keys() == {"one"}
    assert "HTTP 400" in result.broken["one"] and f"(log: {tmp_path / 'one.log'})" in result.broken["one"]
    assert result.missing == ("one: small at 1", "one: small at 2")
    assert {point["variant"] for point in Store(tmp_path).points()} == {"two"}


@pytest.mark.parametrize(
    ("seconds", "passes"),
    [
        ([9.0, 1.0, 0.95], 3),
        ([1.0, 1.2], 2),
        ([1.0, 0.91], 2),
        ([64, 32, 16, 8, 4, 2, 1], 6),
    ],
)
def test_warming_up_ends_when_passes_stop_getting_faster(
    seconds: list[float], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "WARM_PASSES", 6)
    sent, left = [], iter(seconds)

    def drive(url: str, sessions: list, concurrency: int, until: float) -> client.Drive:
        sent.append(sessions)
        return client.Drive((), next(left), 0.0, 0.0)

    monkeypatch.setattr(client, "drive", drive)
    assert measure.warm_up("url", measure.Load.of(LOAD, CORPUS, 0), 2) == seconds[:passes]
    # Two sessions a pass, and no text twice, which would be found in the cache.
    assert [len(wave) for wave in sent] == [2] * passes
    assert len({session.turns for wave in sent for session in wave}) == 2 * passes


@pytest.mark.parametrize(("concurrency", "warmed"), [(1, 16), (3, 16), (20, 20)])
def test_warming_up_has_the_lengths_of_the_measured_requests_and_none_of_their_text(
    concurrency: int, warmed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[Session, ...]] = []

    def drive(url: str, sessions: list[Session], concurrency: int, until: float) -> client.Drive:
        sent.append(tuple(sessions))
        return client.Drive((), 1.0, 0.0, 0.0)

    monkeypatch.setattr(client, "drive", drive)
    kind = Traffic((20, 90), (100, 200), first_input_tokens=(5, 40), turns=(1, 3), think_seconds=(1.0, 2.0))
    load = measure.Load.of(replace(LOAD, traffic=(kind,), least_sessions=18), CORPUS, 3)
    for repeat in (0, 1):
        measure.warm_up("url", load, concurrency, repeat=repeat, passes=1)
    for repeat, wave in enumerate(sent):
        measured = load.sessions(concurrency, f"repeat {repeat}")[:warmed]
        assert [lengths(session) for session in wave] == [lengths(session) for session in measured]
        for sent_one, measured_one in zip(wave, measured, strict=True):
            shared = measured_one.shared_tokens
            assert sent_one.opening[:shared] == measured_one.opening[:shared]
            assert sent_one.opening[shared:] != measured_one.opening[shared:]
            for turn, measured_turn in zip(sent_one.turns, measured_one.turns, strict=True):
                assert not set(turn.branches) & set(measured_turn.branches)
        assert all(turn.think_seconds == 0 for session in wave for turn in session.turns)
    assert [lengths(s) for s in sent[0]] != [lengths(s) for s in sent[1]], "a repeat has lengths of its own"


def test_warming_up_reads_few_long_private_prompts_and_no_other_load_s_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[list[Session]] = []

    def drive(url: str, sessions: list[Session], concurrency: int, until: float) -> client.Drive:
        sent.append(sessions)
        return client.Drive((), 1.0, 0.0, 0.0)

    monkeypatch.setattr(client, "drive", drive)
    long = replace(LOAD, traffic=(Traffic((30_000, 30_000), (5, 5)),), prefix=(), least_sessions=9)
    for concurrency in (1, 4):
        measure.warm_up("url", measure.Load.of(long, CORPUS, 0), concurrency, passes=1)
    # 65,536 tokens, or one session per slot.
    assert [len(wave) for wave in sent] == [2, 4]
    sent.clear()
    corpus = TextCorpus(tuple(range(5000)))
    for name_tokens in (5, 6):
        other = replace(LOAD, traffic=(Traffic((30, 30), (name_tokens, name_tokens)),))
        measure.warm_up("url", measure.Load.of(other, corpus, 0), 1, passes=1)
    first, second = ({turn.branches for s in wave for turn in s.turns} for wave in sent)
    assert not first & second


def lengths(session: Session) -> tuple[int, int, list[list[int]]]:
    return len(session.opening), session.shared_tokens, [list(map(len, t.branches)) for t in session.turns]


def test_counters_memory_and_sglang_s_metrics_are_in_every_point(machine: Machine, tmp_path: Path) -> None:
    assert run(Store(tmp_path), variants=(ONE,))
    for point in Store(tmp_path).points():
        assert point["index_pages_saved"] == 3 * point["index_pages_scored"] > 0
        assert point["total_output"] == point["index_pages_scored"]
        assert point["peak_memory_bytes"] > 0
        assert point["output_throughput"] == pytest.approx(point["total_output"] / point["duration"])
        assert point["median_ttft_ms"] > 0 and point["p99_itl_ms"] >= point["p50_itl_ms"] > 0
        assert point["server_memory_gb"] == {"weight": 1.5, "kvcache": 2.5}
        assert not [name for name in point if "retokenized" in name]
        assert point["streamed_events"] == point["total_output"]
        cpu = point["client_cpu_seconds"]
        assert 0 < cpu <= point["process_cpu_seconds"]
        assert point["client_cpu_us_per_event"] * point["streamed_events"] == pytest.approx(1e6 * cpu)
        assert point["client_core_share"] == pytest.approx(cpu / point["duration"])
