"""A point says what it was measured on, and what is not known about a server elsewhere is not made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench_serving import machine, measure, memory, running, server
from bench_serving.machine import is_here
from bench_serving.memory import Memory, MemorySampler
from bench_serving.running import flags_of, host_of
from bench_serving.server import Counters
from bench_serving.store import Host, Store
from tests.bench_serving.commands import arguments
from tests.bench_serving.fake_server import FakeServer

ELSEWHERE = "http://192.0.2.7:30000"


def test_this_machine_is_known_by_its_addresses() -> None:
    assert is_here("http://localhost:30000") and is_here("http://127.0.0.1:1/x")
    assert not is_here(ELSEWHERE)
    with pytest.raises(ValueError, match=r"no-such-host\.invalid"):
        is_here("http://no-such-host.invalid:1")


def test_a_server_elsewhere_does_not_get_this_machine_s_hardware() -> None:
    unknown = host_of(ELSEWHERE, "", {"version": "0.5.23"})
    assert unknown.machine.startswith("unknown, at 192.0.2.7") and "SGLang 0.5.23" in unknown.machine
    assert unknown.code == "unknown, on another machine"
    assert host_of(ELSEWHERE, "8 x H200", {"version": "1"}).machine == "8 x H200; SGLang 1"
    assert host_of("http://localhost:1", "", {}) == Host(machine.machine(), machine.code())


def test_a_server_elsewhere_has_no_memory_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with MemorySampler(ELSEWHERE) as sampler:
        pass
    assert sampler.memory == Memory("elsewhere", None)
    monkeypatch.setattr(memory, "gpu_bytes_used", lambda: 12345)
    with MemorySampler("http://localhost:1") as sampler:
        pass
    assert sampler.memory == Memory("gpu", 12345)


def test_a_loaded_server_elsewhere_is_reported_as_what_it_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(measure, "WARM_PASSES", 1)
    for module in (running, memory):
        monkeypatch.setattr(module, "is_here", lambda url: False)
    with FakeServer() as fake:
        assert main_run(tmp_path, fake.url) == 0
    (point, _) = Store(tmp_path).points()
    assert point["machine"] == "8 x H100; SGLang None" and point["peak_memory_bytes"] is None
    text = (tmp_path / "README.md").read_text()
    assert "- Machine: 8 x H100; SGLang None." in text and machine.machine() not in text


def main_run(folder: Path, url: str) -> int:
    from bench_serving.__main__ import main

    return main(arguments("run", folder, "--url", url, "--machine", "8 x H100"))


def test_a_running_server_s_flags_are_those_it_was_started_with() -> None:
    command = "python -m sglang.launch_server --model-path '/a b' --load-format dummy"
    assert flags_of({"model_path": "x", "launch_command": command}) == (
        "--model-path", "/a b", "--load-format", "dummy",
    )  # fmt: skip
    assert flags_of({"model_path": "x", "launch_command": None}) == ("--model-path", "x")


def test_counters_that_never_stop_growing_end_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SETTLE_SECONDS", 0.0)
    reads = iter(range(10_000))
    monkeypatch.setattr(server, "_read_counters", lambda url: Counters(next(reads), 0, 0))
    with pytest.raises(RuntimeError, match="somebody else uses that server"):
        server.counters("url")
    values = iter([1, 2, 3, 3, 4])
    monkeypatch.setattr(server, "_read_counters", lambda url: Counters(next(values), 0, 0))
    assert server.counters("url") == Counters(3, 0, 0)
