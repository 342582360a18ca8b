"""Start the tiny checkpoint's server as a child process, and stop it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
START_LIMIT_SECONDS = 600


class ServerDiedError(RuntimeError):
    """The server stopped or did not become healthy; carries the end of its log."""


def free_port() -> int:
    """A TCP port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def serving(
    log: Path, flags: tuple[str, ...] = (), environ: Mapping[str, str] | None = None, quiet: bool = False
) -> Iterator[str]:
    """`launch/serve.sh` with further `flags`; see `running`."""
    with running(("bash", str(ROOT / "launch" / "serve.sh"), *flags), log, environ, quiet) as url:
        yield url


@contextlib.contextmanager
def running(
    command: tuple[str, ...],
    log: Path,
    environ: Mapping[str, str] | None = None,
    quiet: bool = False,
    start_limit: float = START_LIMIT_SECONDS,
) -> Iterator[str]:
    """A command that takes SGLang's `--port`, healthy on entry and gone on exit; yields its URL.

    Raises:
        ServerDiedError: it ended, or was not healthy within `start_limit` seconds.
    """
    # A test process may run Triton's interpreter; a server that inherits it would, too.
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env={**inherited, **(environ or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_healthy(url, process, log, quiet, start_limit)
        yield url
    finally:
        # The server stops its scheduler and detokenizer itself, and takes a signal to them for a crash; they
        # are in its session, should it fail to.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_healthy(
    url: str, process: subprocess.Popen[bytes], log: Path, quiet: bool, start_limit: float
) -> None:
    begin = time.monotonic()
    while time.monotonic() - begin < start_limit:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/health_generate", timeout=5):
                if not quiet:
                    print(f"healthy after {time.monotonic() - begin:.0f} s")
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    end = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
    state = "ended" if process.poll() is not None else f"is not healthy after {start_limit:g} s"
    raise ServerDiedError(f"the server {state}; its log, {log}, ends with:\n{end}")


def metric(url: str, name: str) -> float:
    """The value of a Prometheus metric, summed over its labels; 0 if it was never counted."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    values = (line.rsplit(" ", 1)[1] for line in lines if line.split("{")[0].split(" ")[0] == name)
    return sum(map(float, values))
