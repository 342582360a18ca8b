"""Memory that a server under test takes on this machine."""

from __future__ import annotations

import threading
import urllib.parse
from dataclasses import dataclass

import psutil
import pynvml

from bench_serving.machine import gpus, is_here

SAMPLE_SECONDS = 0.5


@dataclass(frozen=True)
class Memory:
    """Peak memory: of all visible GPUs together, or where there is none, of the server's processes.

    Attributes:
        kind: "gpu", "resident" (set size, shared pages counted in each process), or "elsewhere".
        peak_bytes: the largest sample; None for a server on another machine.
    """

    kind: str
    peak_bytes: int | None


class MemorySampler:
    """Samples the memory of the server at `url` in a thread, between `__enter__` and `__exit__`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._peak = 0
        if is_here(url):
            self._kind = "resident" if gpu_bytes_used() is None else "gpu"
        else:
            self._kind = "elsewhere"
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemorySampler:
        self._processes = _server_processes(self._url) if self._kind == "resident" else []
        if self._kind != "elsewhere":
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def memory(self) -> Memory:
        return Memory(self._kind, None if self._kind == "elsewhere" else self._peak)

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


def _server_processes(url: str) -> list[psutil.Process]:
    """The process on this machine that listens on the URL's port, and its descendants."""
    port = urllib.parse.urlsplit(url).port or 80
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
