"""Fake servers in the place of started ones, for tests of comparisons and commands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench_serving import measure, memory, server
from bench_serving.server import Variant
from tests.bench_serving.fake_server import FakeServer


class Machine:
    """Starts fake servers in `started`'s place and remembers the order."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.logs: list[str] = []
        self.servers: list[FakeServer] = []
        self.fault = lambda number: None

    @contextlib.contextmanager
    def started(self, variant: Variant, log: Path, start_limit: float) -> Iterator[str]:
        with FakeServer(fault=self.fault, token_seconds=0.002) as fake:
            self.order.append(f"+{variant.name}")
            self.logs.append(log.name)
            log.touch()
            self.servers.append(fake)
            try:
                yield fake.url
            finally:
                self.order.append(f"-{variant.name}")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake has nothing to compile and counts at once: one warm-up pass. It is this process."""
    monkeypatch.setattr(server, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(measure, "WARM_PASSES", 1)
    monkeypatch.setattr(memory, "_server_processes", lambda url: [psutil.Process()])


@pytest.fixture
def machine(quick: None, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(server, "started", made.started)
    return made
