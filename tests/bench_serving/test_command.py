"""The whole tool against SGLang serving the tiny checkpoint: counters and outputs, not speed.

Two servers in all. Stock SGLang cannot serve M3 without a GPU, so a feature is compared on and off: the radix
cache, in float32, where the plugin promises the same tokens either way.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench_serving import measure, probe, server
from bench_serving.__main__ import main
from bench_serving.server import Variant
from bench_serving.store import Store
from sglang_m3.tiny import TinyConfig, build

pytestmark = [pytest.mark.server, pytest.mark.long]

TINY = TinyConfig(layers=3)
"""One dense layer, and two sparse ones, which differ: what is asserted here does not grow with more."""

LOAD = """
description = "Answers long enough to overlap on any machine."
concurrency = [1, 3]
requests_per_slot = 1
least_sessions = 3

[[prefix]]
tokens = 400

[[traffic]]
input_tokens = [10, 30]
output_tokens = [10, 14]
"""


@pytest.fixture(autouse=True)
def warmed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled without a GPU, and nothing here is a time."""
    monkeypatch.setattr(measure, "WARM_PASSES", 1)


@pytest.fixture
def load(tmp_path: Path) -> list[str]:
    path = tmp_path / "overlapping.toml"
    path.write_text(LOAD)
    return ["--workload", str(path)]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    tiny = build(tmp_path_factory.mktemp("bench") / "tiny", TINY)
    return [
        "--model-path", str(tiny), "--trust-remote-code", "--dtype", "float32",
        "--chunked-prefill-size", "1024", "--max-total-tokens", "32768", "--sleep-on-idle",
        "--random-seed", "1",
    ]  # fmt: skip


VARIANTS = {"cached": (), "uncached": ("--disable-radix-cache",)}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where the server of each variant records what it does."""
    return {name: tmp_path_factory.mktemp(name) for name in VARIANTS}


@pytest.fixture(scope="module")
def urls(
    flags: list[str], recorded: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """A server of each variant, started and stopped side by side: starting keeps a core busy for a minute."""
    folder = tmp_path_factory.mktemp("bench")
    variants = [Variant(name, (), (*flags, *more)) for name, more in VARIANTS.items()]
    servers = [
        server.started(probe.recording(variant, recorded[variant.name]), folder / f"{variant.name}.log")
        for variant in variants
    ]
    stacks = [contextlib.ExitStack() for _ in servers]
    with ThreadPoolExecutor() as pool:
        starting = [pool.submit(stack.enter_context, one) for stack, one in zip(stacks, servers)]
        try:
            yield {name: one.result() for name, one in zip(VARIANTS, starting)}
        finally:
            # Those that were still starting, if one failed, are stopped, too.
            concurrent.futures.wait(starting)
            list(pool.map(contextlib.ExitStack.close, stacks))


@pytest.fixture
def url(urls: dict[str, str]) -> str:
    return urls["cached"]


def test_a_feature_on_and_off_gives_the_same_tokens_and_a_report(
    urls: dict[str, str],
    recorded: dict[str, Path],
    flags: list[str],
    load: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextlib.contextmanager
    def started(variant: Variant, log: Path, start_limit: float) -> Iterator[str]:
        """The server of this variant, which is up already, and records in a folder of its own."""
        assert variant.flags == (*flags, *VARIANTS[variant.name])
        asked = dict(variant.environment).get(probe.RECORD)
        if asked is None:
            yield urls[variant.name]
            return
        Path(asked).rmdir()
        Path(asked).symlink_to(recorded[variant.name])
        yield urls[variant.name]
        Path(asked).unlink()
        Path(asked).mkdir()

    monkeypatch.setattr(server, "started", started)
    variants = [word for name, more in VARIANTS.items() for word in ("--variant", " ".join([name, *more]))]
    out = tmp_path / "out"
    assert (
        main(["compare", *load, *variants, "--rounds", "1", "--probe", "--out", str(out), "--", *flags]) == 0
    )

    points = Store(out).points()
    assert [(point["variant"], point["max_concurrency"], point["failed"]) for point in points] == [
        (variant, concurrency, 0) for variant in ("cached", "uncached") for concurrency in (1, 3)
    ]
    for point in points:
        # 400 tokens of prefix are three whole pages.
        cached = 3 * 128 * point["requests"] if point["variant"] == "cached" else 0
        assert point["cached_tokens"] == cached, point
        assert point["index_pages_scored"] > 0, point
        assert point["memory_kind"] == "resident" and point["peak_memory_bytes"] > 1e9, point
        assert 0.8 < point["overlap"] < 1, point
    saved = {(point["variant"], point["max_concurrency"]): point["index_pages_saved"] for point in points}
    assert saved["cached", 3] > 0 and saved["cached", 1] == 0, saved
    assert saved["uncached", 3] == 0, saved

    for did in Store(out).probes():
        # Three sessions of up to 30 tokens and 14 answered, the last of which is never an input; in the cache
        # are three pages of the prefix.
        least, most = (3 * (10 + 9), 3 * (30 + 13)) if did["variant"] == "cached" else (3 * 419, 3 * 443)
        assert least <= did["tokens"] <= most + 3 * 16, did
        assert did["visible_blocks"] == 4 and did["experts"] == TINY.experts, did
        assert 1 <= did["distinct_blocks"]["least"] <= did["distinct_blocks"]["most"] <= 4, did
        each_step, touched = did["experts_each_step"], did["experts_touched"]
        assert 2 <= each_step["least"] <= each_step["most"] <= touched["most"] <= did["experts"], did
    assert [did["variant"] for did in Store(out).probes()] == ["cached", "uncached"]

    text = (out / "README.md").read_text()
    assert "## What the work was" in text
    assert re.search(r"\| cached \| uncached \| 6 \| 0 \|", text), text
    assert (out / "latency-against-throughput.png").read_bytes().startswith(b"\x89PNG")


SMALL = ["--concurrency", "2", "--requests-per-slot", "1", "--least-sessions", "2"]


def test_every_kind_of_session_is_served(url: str, tmp_path: Path) -> None:
    names = ["tool-loop", "fan-out", "tree", "mixed", "private-long"]
    command = ["run", "--workload", ",".join(names), "--scale", "0.02", *SMALL, "--url", url]
    assert main([*command, "--out", str(tmp_path)]) == 0
    loop, fan, tree, mixed, private = points = Store(tmp_path).points()
    assert [point["workload"] for point in points] == names
    assert [point["failed"] for point in points] == [0] * len(names)
    # A later turn finds its own earlier ones in the cache, generated tokens included.
    assert loop["cached_tokens"] > 0 and loop["requests"] >= 8
    assert fan["requests"] == 16 and fan["index_pages_saved"] > 0
    # Branches of a fan-out come at once, before the first of them is in the cache.
    for point in (loop, tree):
        assert point["cached_share"] == pytest.approx(point["overlap"], abs=0.2), point
    assert tree["cached_tokens"] > 0 and mixed["requests"] == 2
    assert private["cached_tokens"] == private["overlap"] == private["index_pages_saved"] == 0


SWEEPS = {
    "first-token-against-prefix.png": "prefix_tokens_sweep = [128, 640]",
    "token-time-against-sharing.png": "shared_share_sweep = [0.0, 1.0]",
}


def test_sweeps_draw_their_plots(url: str, tmp_path: Path) -> None:
    for plot, sweep in SWEEPS.items():
        path = tmp_path / f"{plot}.toml"
        path.write_text(LOAD.replace("[1, 3]", f"[2]\n{sweep}"))
        out = tmp_path / plot.removesuffix(".png")
        assert main(["run", "--workload", str(path), *SMALL, "--url", url, "--out", str(out)]) == 0
        assert (out / plot).read_bytes().startswith(b"\x89PNG")
        assert f"![{out.name.replace('-', ' ')}]({plot})" in (out / "README.md").read_text()
        first, second = Store(out).points()
        assert first["failed"] == second["failed"] == 0
        assert first["cached_share"] < second["cached_share"]


def test_the_knee_is_found(url: str, load: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    target = ["--tokens-per-s", "0.01", "--first-token-s", "1000", "--most", "2"]
    assert main(["knee", *load, "--url", url, *target]) == 0
    assert "knee: 2 in flight (the highest tried, --most 2)" in capsys.readouterr().out


def test_a_profile_accounts_for_the_whole_step(url: str, tmp_path: Path) -> None:
    sizes = ["--prefix-tokens", "256", "--new-tokens", "64", "--concurrency", "2", "--steps", "3"]
    assert main(["profile", "--url", url, *sizes, "--out", str(tmp_path)]) == 0
    stages = json.loads((tmp_path / "breakdown.json").read_text())["found"]["server"]
    extend, decode = stages["EXTEND"], stages["DECODE"]
    assert (extend["stage"], extend["requests"], extend["tokens"]) == ("EXTEND", 1, 64)
    assert (decode["stage"], decode["requests"]) == ("DECODE", 2)
    for stage in (extend, decode):
        assert stage["steps"] >= 3
        assert sum(stage["parts"].values()) == pytest.approx(stage["microseconds"])
        assert stage["parts"]["linears"] > 0 and stage["parts"]["launch gaps"] > 0
        assert stage["host_microseconds"] >= stage["microseconds"]
    assert (tmp_path / "step-parts.png").read_bytes().startswith(b"\x89PNG")
