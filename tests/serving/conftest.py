from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sglang_m3.tiny import TinyConfig, build
from tests import oracle
from tests.conftest import group_of
from tests.serving import forced
from tests.serving.client import Server, server
from tests.serving.expectation import Oracle

POOL_TOKENS = 44 * 128
"""Little more than the longest prompt needs, so that a few requests together need more."""


_SERVERS = contextlib.ExitStack()
"""Servers that several files share. They stop after their group's last test, not with the session: each takes
gigabytes."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or group_of(nextitem) != group_of(item):
        _SERVERS.close()


@dataclass(frozen=True)
class Endpoint:
    """A running server of the tiny checkpoint, and its log."""

    url: str
    log: Path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("served") / "tiny", TinyConfig())


@pytest.fixture(scope="session")
def expected(tiny: Path) -> Oracle:
    return Oracle(oracle.load_oracle(tiny))


@pytest.fixture(scope="session")
def prompt(tiny: Path) -> Callable[[int, int], list[int]]:
    """`prompt(length, seed)`: token ids of real source code, from another place for every seed.

    The default place has no two blocks, in any layer and row of the longest prompt, whose scores differ by
    less than 4e-5 at the edge of the selection: a rounding error in front of it decides nothing.
    """
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    ids = tokenizer(inspect.getsource(inspect) + inspect.getsource(random))["input_ids"]

    def cut(length: int, seed: int = 10) -> list[int]:
        begin = random.Random(seed).randrange(len(ids) - length)
        return ids[begin : begin + length]

    return cut


@pytest.fixture(scope="session")
def float32(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server to compare with the oracle, in the group `float32`: it has a pool of `POOL_TOKENS`, and admits
    requests as if answers were short. It may have been left with any chunk size, cache and records."""
    scratch = tmp_path_factory.mktemp("float32")
    flags = ("--max-total-tokens", str(POOL_TOKENS), "--schedule-conservativeness", "0.05")
    return _SERVERS.enter_context(server(tiny, scratch, "--chunked-prefill-size", "384", *flags))


@pytest.fixture(scope="session")
def endpoint(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Endpoint:
    """`launch/serve.sh` in bfloat16, in the group `bfloat16`, which takes forced replies, too."""
    scratch = tmp_path_factory.mktemp("endpoint")
    url = _SERVERS.enter_context(forced.server(tiny, scratch, "--decode-log-interval", "5"))
    return Endpoint(url, scratch / "server.log")
