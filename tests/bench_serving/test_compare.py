"""A comparison measures every point once, in a fair order, and goes on where it stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bench_serving import client, compare, corpus, measure, server
from bench_serving.__main__ import main
from bench_serving.compare import Comparison
from bench_serving.corpus import RandomCorpus
from bench_serving.server import Variant
from bench_serving.store import Store
from bench_serving.workload import PrefixLevel, Traffic, Workload
from sglang_m3.tiny import tokenizer
from tests.bench_serving.fake_server import FakeServer

KIND = Traffic(input_tokens=(4, 9), output_tokens=(2, 5))
LOAD = Workload(
    "small", "Small.", (1, 2), (KIND,), (PrefixLevel(300),), requests_per_slot=1, least_sessions=2
)
ONE, TWO = (Variant(name, (), ("--model-path", "m")) for name in ("one", "two"))
CORPUS = RandomCorpus(500)


class Machine:
    """Starts fake servers in `started`'s place and remembers the order."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.servers: list[FakeServer] = []
        self.fault = lambda number: None

    @contextlib.contextmanager
    def started(self, variant: Variant, log: Path) -> Iterator[str]:
        with FakeServer(fault=self.fault, token_seconds=0.002) as fake:
            self.order.append(f"+{variant.name}")
            self.servers.append(fake)
            yield fake.url
        self.order.append(f"-{variant.name}")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake has nothing to compile and counts at once: one warm-up pass."""
    monkeypatch.setattr(server, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(measure, "WARM_PASSES", 1)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(server, "started", made.started)
    return made


def run(store: Store, **changed: object) -> bool:
    options = {"variants": (ONE, TWO), "workloads": (LOAD,), "repeats": 1, "rounds": 1, "seed": 0} | changed
    result = compare.run(Comparison(**options), CORPUS, store)
    assert result.broken == {}
    return result.complete


def test_every_other_round_goes_backwards(machine: Machine, tmp_path: Path) -> None:
    assert run(Store(tmp_path), rounds=2)
    assert machine.order == ["+one", "-one", "+two", "-two", "+two", "-two", "+one", "-one"]
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
    assert not run(Store(tmp_path), stop_after_seconds=0.0)
    assert Store(tmp_path).points() == []
    assert run(Store(tmp_path))


def test_failures_while_measuring_are_in_the_point(machine: Machine, tmp_path: Path) -> None:
    # The prefix, one request to warm up, then the point's second.
    machine.fault = lambda number: "http" if number == 3 else None
    assert run(Store(tmp_path), variants=(ONE,))
    first, second = Store(tmp_path).points()
    assert (first["requests"], first["failed"], second["failed"]) == (2, 1, 0)
    assert first["completed"] == 1 and list(first["errors"].values()) == [1]


def test_a_variant_that_breaks_leaves_the_others(machine: Machine, tmp_path: Path) -> None:
    machine.fault = lambda number: "http" if machine.order == ["+one"] else None
    result = compare.run(Comparison((ONE, TWO), (LOAD,), 1, 1, 0), CORPUS, Store(tmp_path))
    assert result.broken.keys() == {"one"} and "HTTP 400" in result.broken["one"]
    assert not result.complete
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

    def drive(url: str, sessions: list, concurrency: int) -> client.Drive:
        sent.append(sessions)
        return client.Drive((), next(left), 0.0)

    monkeypatch.setattr(client, "drive", drive)
    assert measure.warm_up("url", measure.Load.of(LOAD, CORPUS, 0), 2) == seconds[:passes]
    # Two sessions a pass, and no text twice, which would be found in the cache.
    assert [len(wave) for wave in sent] == [2] * passes
    assert len({session.turns for wave in sent for session in wave}) == 2 * passes


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


FLAGS = ["--", "--model-path", "m"]


def arguments(command: str, folder: Path, *more: str) -> list[str]:
    return [
        command, "--workload", "agentic-60k", "--scale", "0.01", "--concurrency", "1,2",
        "--requests-per-slot", "1", "--least-sessions", "2", "--prompts", "random", "--vocab", "500",
        "--out", str(folder), *more,
    ]  # fmt: skip


def test_the_command_compares_and_reports(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments("compare", tmp_path, "--variant", "one", "--variant", "two A=1"), *FLAGS]) == 0
    assert (tmp_path / "latency-against-throughput.png").exists()
    text = (tmp_path / "README.md").read_text()
    assert "--variant one --variant 'two A=1'" in text
    assert "| one | two | 4 | 0 |  |" in text, text
    # The report can be made again elsewhere, from the points alone.
    (tmp_path / "README.md").unlink()
    assert main(["report", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "README.md").read_text() == text


WRONG = {
    "no model": (["--variant", "one"], [], "--model-path"),
    "same name twice": (["--variant", "one", "--variant", "one A=1"], FLAGS, "different names"),
    "no such workload": (["--workload", "nothing"], FLAGS, "agentic-60k"),
    "stock without a GPU": (["--variant", "stock SGLANG_PLUGINS=none"], FLAGS, "cannot serve M3 without"),
    "not a variant": (["--variant=--flag"], FLAGS, "variant"),
}


@pytest.mark.parametrize(("more", "flags", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_command_says_what_is_wrong(
    more: list[str],
    flags: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "gpu_bytes_used", lambda: None)
    assert main([*arguments("compare", tmp_path, *more), *flags]) == 1
    assert message in capsys.readouterr().err


def test_a_running_server_is_loaded_from_an_empty_cache(tmp_path: Path) -> None:
    with FakeServer() as fake:
        assert main(arguments("run", tmp_path, "--url", fake.url, "--repeats", "2")) == 0
    assert fake.flushed == 1
    assert len(Store(tmp_path).points()) == 4


def test_the_knee_of_a_running_server_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(token_seconds=0.01) as fake:
        options = ["--url", fake.url, "--most", "3", "--tokens-per-s", "20", "--first-token-s", "5"]
        assert main([*arguments("knee", tmp_path / "knee.jsonl"), *options]) == 0
        assert "knee: 3 in flight (the highest tried, --most 3)" in capsys.readouterr().out
        options[5] = "1000"
        assert main([*arguments("knee", tmp_path / "knee.jsonl"), *options]) == 1
        assert "no concurrency meets" in capsys.readouterr().out
    assert len((tmp_path / "knee.jsonl").read_text().splitlines()) == 4


def test_flags_for_servers_are_refused_where_none_is_started(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main([*arguments("run", tmp_path, "--url", "http://x"), *FLAGS])


def test_text_prompts_are_the_standard_library_in_the_model_s_tokens(tmp_path: Path) -> None:
    tokenizer.write(tmp_path, 2560, 1000)
    text = "".join(corpus.source_text(30_000))
    made = corpus.text_corpus(str(tmp_path), characters=30_000)
    assert AutoTokenizer.from_pretrained(tmp_path).decode(list(made.ids)) == text
    assert len(text) == 30_000 and "import" in text
