"""The whole tool against SGLang serving the tiny checkpoint: counters and outputs, not speed.

Two servers in all. Stock SGLang cannot serve M3 without a GPU, so a feature is compared on and off: the radix
cache, in float32, where the plugin promises the same tokens either way.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench_serving import server
from bench_serving.__main__ import main
from bench_serving.server import Variant
from bench_serving.store import Store
from sglang_m3.tiny import TinyConfig, build

pytestmark = [pytest.mark.server, pytest.mark.long]

LOAD = """
description = "Answers long enough to overlap on any machine."
concurrency = [1, 3]
requests_per_slot = 1
least_sessions = 3

[[prefix]]
tokens = 1200

[[traffic]]
input_tokens = [10, 30]
output_tokens = [10, 14]
"""


@pytest.fixture
def load(tmp_path: Path) -> list[str]:
    path = tmp_path / "overlapping.toml"
    path.write_text(LOAD)
    return ["--workload", str(path)]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    tiny = build(tmp_path_factory.mktemp("bench") / "tiny", TinyConfig())
    return [
        "--model-path", str(tiny), "--trust-remote-code", "--dtype", "float32",
        "--chunked-prefill-size", "1024", "--max-total-tokens", "32768", "--sleep-on-idle",
        "--random-seed", "1",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def url(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("bench") / "cached.log"
    with server.started(Variant("cached", (), tuple(flags)), log) as served:
        yield served


def test_a_feature_on_and_off_gives_the_same_tokens_and_a_report(
    url: str, flags: list[str], load: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = server.started

    @contextlib.contextmanager
    def started(variant: Variant, log: Path) -> Iterator[str]:
        """The server that is up already in the first variant's place: it has the same flags."""
        if variant.name == "cached":
            yield url
        else:
            with start(variant, log) as served:
                yield served

    monkeypatch.setattr(server, "started", started)
    variants = ["--variant", "cached", "--variant", "uncached --disable-radix-cache"]
    out = tmp_path / "out"
    assert main(["compare", *load, *variants, "--out", str(out), "--", *flags]) == 0

    points = Store(out).points()
    assert [(point["variant"], point["max_concurrency"], point["failed"]) for point in points] == [
        (variant, concurrency, 0) for variant in ("cached", "uncached") for concurrency in (1, 3)
    ]
    for point in points:
        # 1,200 tokens of prefix are nine whole pages.
        cached = 9 * 128 * point["requests"] if point["variant"] == "cached" else 0
        assert point["cached_tokens"] == cached, point
        assert point["index_pages_scored"] > 0, point
        assert point["memory_kind"] == "resident" and point["peak_memory_bytes"] > 1e9, point
        assert 0.9 < point["overlap"] < 1, point
    saved = {(point["variant"], point["max_concurrency"]): point["index_pages_saved"] for point in points}
    assert saved["cached", 3] > 0 and saved["cached", 1] == 0, saved
    assert saved["uncached", 3] == 0, saved

    text = (out / "README.md").read_text()
    assert re.search(r"\| cached \| uncached \| 6 \| 0 \|", text), text
    assert (out / "latency-against-throughput.png").read_bytes().startswith(b"\x89PNG")


def test_sessions_with_turns_and_branches_are_served(url: str, tmp_path: Path) -> None:
    sizes = ["--scale", "0.02", "--concurrency", "2", "--requests-per-slot", "1", "--least-sessions", "2"]
    command = ["run", "--workload", "tool-loop,fan-out", *sizes, "--url", url, "--out", str(tmp_path)]
    assert main(command) == 0
    loop, fan = Store(tmp_path).points()
    assert loop["failed"] == fan["failed"] == 0
    # A later turn finds its own earlier ones in the cache, generated tokens included.
    assert loop["cached_tokens"] > 0 and loop["requests"] >= 8
    assert fan["requests"] == 16 and fan["index_pages_saved"] > 0


def test_the_knee_is_found(url: str, load: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    target = ["--tokens-per-s", "0.01", "--first-token-s", "1000", "--most", "2"]
    assert main(["knee", *load, "--url", url, *target]) == 0
    assert "knee: 2 in flight (the highest tried, --most 2)" in capsys.readouterr().out


def test_a_profile_accounts_for_the_whole_step(url: str, tmp_path: Path) -> None:
    sizes = ["--prefix-tokens", "1280", "--new-tokens", "128", "--concurrency", "2", "--steps", "3"]
    assert main(["profile", "--url", url, *sizes, "--out", str(tmp_path)]) == 0
    extend, decode = json.loads((tmp_path / "breakdown.json").read_text())["server"]
    assert (extend["stage"], extend["requests"], extend["tokens"]) == ("EXTEND", 1, 128)
    assert (decode["stage"], decode["requests"]) == ("DECODE", 2)
    for stage in (extend, decode):
        assert stage["steps"] >= 3
        assert sum(stage["parts"].values()) == pytest.approx(stage["microseconds"])
        assert stage["parts"]["linears"] > 0 and stage["parts"]["launch gaps"] > 0
    assert (tmp_path / "step-parts.png").read_bytes().startswith(b"\x89PNG")
