"""What a measurement was made on, and with which code."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import urllib.parse
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pynvml

ROOT = Path(__file__).parent.parent
MEASURED_CODE = ("sglang_m3", "kernels")


@cache
def gpus() -> tuple[Any, ...]:
    """NVML's handles of the GPUs that `CUDA_VISIBLE_DEVICES` leaves; none without a driver.

    Unlike CUDA, NVML takes no memory of them. Names that are no indices (UUIDs) leave all of them.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    count = pynvml.nvmlDeviceGetCount()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").split(",")
    indices = list(map(int, visible)) if all(map(str.isdecimal, visible)) else range(count)
    return tuple(pynvml.nvmlDeviceGetHandleByIndex(index) for index in indices if index < count)


@cache
def machine() -> str:
    """The machine and the versions that matter, in one line."""
    names = [pynvml.nvmlDeviceGetName(gpu) for gpu in gpus()]
    if names:
        hardware = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))
    else:
        hardware = f"no GPU, {os.cpu_count()} x {platform.machine()} cores"
    return f"{hardware}; SGLang {version('sglang')}, torch {version('torch')}, Triton {version('triton')}"


@cache
def code() -> str:
    """Eight hex digits of the plugin's and the operators' source and configurations."""
    digest = hashlib.sha256()
    for folder in MEASURED_CODE:
        for path in sorted(
            path for ending in ("py", "json") for path in (ROOT / folder).rglob(f"*.{ending}")
        ):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def is_here(url: str) -> bool:
    """Whether the server at `url` is on this machine: its address is one of ours.

    Raises:
        ValueError: the host has no address.
    """
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        there = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ValueError(f"{url}: {error}") from error
    ours = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return bool(there & ours)
