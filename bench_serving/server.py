"""The server under test: its answers about itself, its counters, its memory."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml

from bench_serving.machine import gpus
from launch.server import metric, running

WEIGHT_FLAGS = (
    "--model-path",
    "--quantization",
    "--dtype",
    "--load-format",
    "--revision",
    "--kv-cache-dtype",
    "--json-model-override-args",
    "--random-seed",
)
"""Flags that decide which numbers a server computes with."""

SAMPLE_SECONDS = 0.5
SETTLE_SECONDS = 0.4
"""Counters that did not grow for so long are complete: an idle scheduler publishes at once."""
RELEASE_LIMIT_SECONDS = 60
RELEASE_SLACK_BYTES = 1 << 30


@dataclass(frozen=True)
class Variant:
    """A way to serve: `python -m sglang.launch_server` with these flags in this environment.

    Attributes:
        name: as the report calls it.
        environment: variables set in addition to this process's, as (name, value).
        flags: SGLang's flags, the common ones included.
    """

    name: str
    environment: tuple[tuple[str, str], ...]
    flags: tuple[str, ...]

    @property
    def weights(self) -> tuple[str, ...]:
        """What must be equal for greedy outputs to be comparable: the flags in `WEIGHT_FLAGS`, as given."""
        given = _flag_values(self.flags)
        return tuple(f"{flag}={given[flag]}" for flag in WEIGHT_FLAGS if flag in given)

    def flag(self, name: str) -> str:
        """The value of a flag; empty if it is not given."""
        return _flag_values(self.flags).get(name, "")


def parse_variant(text: str, common_flags: tuple[str, ...]) -> Variant:
    """A variant from `NAME [VARIABLE=value ...] [--flag ...]`; its flags follow the common ones and win.

    Raises:
        ValueError: no name, or a flag before a variable.
    """
    words = shlex.split(text)
    if not words or words[0].startswith("-") or "=" in words[0]:
        raise ValueError(f"a variant is 'NAME [VARIABLE=value ...] [--flag ...]', not {text!r}")
    environment: list[tuple[str, str]] = []
    rest = words[1:]
    while rest and not rest[0].startswith("-"):
        variable, separator, value = rest.pop(0).partition("=")
        if not separator:
            raise ValueError(f"variant {words[0]}: {variable!r} is neither VARIABLE=value nor a flag")
        environment.append((variable, value))
    return Variant(words[0], tuple(environment), (*common_flags, *rest))


@contextlib.contextmanager
def started(variant: Variant, log: Path) -> Iterator[str]:
    """The variant's server, healthy on entry and gone on exit; yields its URL.

    Waits at the end until the GPUs' memory is as free as before: the next server sizes its cache by it.

    Raises:
        ServerDiedError: it did not become healthy; carries the end of its log.
    """
    before = gpu_bytes_used()
    # Counters and cache hits are part of every report.
    flags = (*variant.flags, "--enable-metrics")
    command = (sys.executable, "-m", "sglang.launch_server", *flags)
    print(f"starting {variant.name}; log: {log}", flush=True)
    with running(command, log, dict(variant.environment)) as url:
        yield url
    begin = time.monotonic()
    while before is not None and time.monotonic() - begin < RELEASE_LIMIT_SECONDS:
        if gpu_bytes_used() <= before + RELEASE_SLACK_BYTES:
            break
        time.sleep(0.5)


def info(url: str) -> dict[str, Any]:
    """The server's `/server_info`: its resolved arguments and `internal_states`."""
    return _get_json(f"{url}/server_info")


def capacity(url: str) -> dict[str, Any]:
    """Tokens that the server's cache holds, and what its memory goes to, in GB, as it says itself."""
    states = info(url)
    internal = (states.get("internal_states") or [{}])[0]
    return {
        "max_total_num_tokens": states.get("max_total_num_tokens"),
        "server_memory_gb": internal.get("memory_usage"),
    }


def post(url: str, path: str, body: dict[str, Any] | None = None) -> str:
    """POST JSON and return the answer's text. Raises urllib.error.HTTPError."""
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return response.read().decode()


def flush_cache(url: str) -> None:
    """Empty the radix cache. Raises urllib.error.HTTPError while requests run."""
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/flush_cache?timeout=60", method="POST"), timeout=90
    ):
        pass


@dataclass(frozen=True)
class Counters:
    """The plugin's counters, per sparse layer; all 0 without the plugin or without `--enable-metrics`."""

    pages_scored: int
    pages_saved: int
    rows: int

    def since(self, before: Counters) -> Counters:
        return Counters(
            self.pages_scored - before.pages_scored,
            self.pages_saved - before.pages_saved,
            self.rows - before.rows,
        )


def counters(url: str) -> Counters:
    """The counters when they have stopped growing: the last steps are counted when the server is idle."""
    value = _read_counters(url)
    while True:
        time.sleep(SETTLE_SECONDS)
        again = _read_counters(url)
        if again == value:
            return value
        value = again


def _read_counters(url: str) -> Counters:
    names = ("index_pages_scored", "index_pages_saved", "rows")
    try:
        return Counters(*(round(metric(url, f"sglang:m3_{name}_total")) for name in names))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return Counters(0, 0, 0)
        raise


@dataclass(frozen=True)
class Memory:
    """Peak memory: of all visible GPUs together, or where there is none, of the server's processes.

    Attributes:
        kind: "gpu", or "resident" (set size, shared pages counted in each process).
        peak_bytes: the largest sample.
    """

    kind: str
    peak_bytes: int


class MemorySampler:
    """Samples memory in a thread between `__enter__` and `__exit__`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stop = threading.Event()
        self._peak = 0
        self._kind = "resident" if gpu_bytes_used() is None else "gpu"
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemorySampler:
        self._processes = [] if self._kind == "gpu" else _server_processes(self._port)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def memory(self) -> Memory:
        return Memory(self._kind, self._peak)

    def _run(self) -> None:
        while True:
            used = gpu_bytes_used()
            if used is None:
                used = sum(map(_resident_bytes, self._processes))
            self._peak = max(self._peak, used)
            if self._stop.wait(SAMPLE_SECONDS):
                return


def gpu_bytes_used() -> int | None:
    """Memory in use on all GPUs of the machine; None where there is none."""
    if not gpus():
        return None
    return sum(pynvml.nvmlDeviceGetMemoryInfo(gpu).used for gpu in gpus())


def _server_processes(port: int) -> list[psutil.Process]:
    """The process on this machine that listens on `port`, and its descendants."""
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            server = psutil.Process(connection.pid)
            return [server, *server.children(recursive=True)]
    return []


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


def _flag_values(flags: tuple[str, ...]) -> dict[str, str]:
    """`--flag value`, `--flag=value` and bare flags by name; the last one wins, as in argparse."""
    values: dict[str, str] = {}
    name = ""
    for word in flags:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            values[name] = value
        elif name:
            values[name] = f"{values[name]} {word}".strip()
    return values


def _get_json(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.loads(response.read())
