"""The server under test: its answers about itself, its counters, its memory."""

from __future__ import annotations

import contextlib
import http.client
import json
import shlex
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_serving.memory import gpu_bytes_used
from launch.server import ServerDiedError, metric, running

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

DUMMY_FLAGS = ("--tp-size", "--ep-size", "--pp-size")
PLUGINS = "SGLANG_PLUGINS"
"""With `--load-format dummy` these decide too: every loader draws numbers of its own, by rank and shape."""

START_LIMIT_SECONDS = 3600.0
"""A server that reads a released checkpoint from a network disk takes tens of minutes."""
SETTLE_SECONDS = 0.4
"""Counters that did not grow for so long are complete: an idle scheduler publishes at once."""
SETTLE_READS = 50
FAILURES = (RuntimeError, OSError, http.client.HTTPException)
"""What starting a server and asking it may end in."""
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
        """What must be equal for greedy outputs to be comparable: the flags in `WEIGHT_FLAGS`, as given, and
        for dummy weights what they are drawn by."""
        given = _flag_values(self.flags)
        decide = WEIGHT_FLAGS
        loader: tuple[str, ...] = ()
        if has_dummy_weights(self):
            decide += DUMMY_FLAGS
            loader = (f"dummy weights with {PLUGINS}={dict(self.environment).get(PLUGINS, '')}",)
        return (*(f"{flag}={given[flag]}" for flag in decide if flag in given), *loader)

    def has(self, name: str) -> bool:
        """Whether a flag is given."""
        return name in _flag_values(self.flags)

    def flag(self, name: str) -> str:
        """The value of a flag; empty if it is not given."""
        return _flag_values(self.flags).get(name, "")


def has_dummy_weights(variant: Variant) -> bool:
    """Whether its weights are random numbers instead of a checkpoint's."""
    return variant.flag("--load-format") == "dummy"


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
def started(variant: Variant, log: Path, start_limit: float = START_LIMIT_SECONDS) -> Iterator[str]:
    """The variant's server, healthy on entry and gone on exit; yields its URL.

    Waits at the end until the GPUs' memory is as free as before: the next server sizes its cache by it.

    Raises:
        ServerDiedError: it ended, or was not healthy within `start_limit` seconds; carries its log's end.
    """
    before = gpu_bytes_used()
    # Counters and cache hits are part of every report.
    flags = (*variant.flags, "--enable-metrics")
    command = (sys.executable, "-m", "sglang.launch_server", *flags)
    print(f"starting {variant.name}; log: {log}", flush=True)
    with running(command, log, dict(variant.environment), start_limit=start_limit) as url:
        yield url
    begin = time.monotonic()
    while before is not None and time.monotonic() - begin < RELEASE_LIMIT_SECONDS:
        if gpu_bytes_used() <= before + RELEASE_SLACK_BYTES:
            break
        time.sleep(0.5)


def why(error: BaseException, *logs: Path) -> str:
    """What a server ended in, and where its log is if that does not say."""
    named = ", ".join(str(log) for log in logs if log.exists())
    return str(error) if isinstance(error, ServerDiedError) or not named else f"{error} (log: {named})"


def info(url: str) -> dict[str, Any]:
    """The server's `/server_info`: its resolved arguments and `internal_states`.

    Raises:
        RuntimeError: it is no SGLang server.
        OSError: it did not answer.
    """
    try:
        answer = _get_json(f"{url}/server_info")
    except (ValueError, urllib.error.HTTPError, http.client.HTTPException) as error:
        raise RuntimeError(f"/server_info is not answered as SGLang does: {error!r}") from error
    if not isinstance(answer, dict) or "model_path" not in answer:
        raise RuntimeError("/server_info names no model_path: this is no SGLang server")
    return answer


def capacity(url: str) -> dict[str, Any]:
    """Tokens that the server's cache holds, and what its memory goes to, in GB, as it says itself."""
    states = info(url)
    internal = (states.get("internal_states") or [{}])[0]
    return {
        "max_total_num_tokens": states.get("max_total_num_tokens"),
        "server_memory_gb": internal.get("memory_usage"),
    }


def post(url: str, path: str, body: dict[str, Any] | None = None, limit_seconds: float = 600.0) -> str:
    """POST JSON and return the answer's text.

    Raises:
        urllib.error.HTTPError: the server refused.
        OSError: it did not answer, or not for `limit_seconds`.
    """
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=limit_seconds) as response:
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
    """The counters when they have stopped growing: the last steps are counted when the server is idle.

    Raises:
        RuntimeError: they do not stop.
    """
    value = _read_counters(url)
    for _ in range(SETTLE_READS):
        time.sleep(SETTLE_SECONDS)
        again = _read_counters(url)
        if again == value:
            return value
        value = again
    raise RuntimeError(f"the counters of {url} go on growing: somebody else uses that server, too")


def _read_counters(url: str) -> Counters:
    names = ("index_pages_scored", "index_pages_saved", "rows")
    try:
        return Counters(*(round(metric(url, f"sglang:m3_{name}_total")) for name in names))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return Counters(0, 0, 0)
        raise


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
