"""A server that cannot start says why before weights load, and one whose worker is killed ends.

Other reasons are tested in-process: `tests/test_overrides.py`, `tests/test_checkpoint.py`, `tests/config/`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests
from safetensors.torch import load_file, save_file

from launch.server import free_port, serving
from sglang_m3.tiny import TinyConfig, build

pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.xdist_group("bad start")]

WEIGHTS_LOAD = "Load weight begin"


def start(checkpoint: Path, *flags: str, before_weights: bool = True) -> str:
    """Start a server that must end by itself, by default before weights load; its log."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint), *flags]
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=inherited, capture_output=True, text=True, timeout=300)
    log = done.stdout + done.stderr
    assert done.returncode != 0, log[-3000:]
    assert (WEIGHTS_LOAD in log) != before_weights, log[-3000:]
    return log


def test_a_taken_port(tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        log = start(tiny, "--port", str(port))
    assert f"cannot listen on 127.0.0.1, port {port}" in log, log[-3000:]


def test_a_tensor_that_one_pipeline_stage_refuses_ends_all(tmp_path: Path) -> None:
    """An expert of the last layer is not in the format, which the first stage has no reason to know."""
    checkpoint = build(tmp_path / "mixed", TinyConfig(quantize="mxfp8"))
    expert = "language_model.model.layers.4.block_sparse_moe.experts.3.w2.weight"
    for path in checkpoint.glob("*.safetensors"):
        tensors = load_file(path)
        if expert in tensors:
            tensors[expert] = tensors[expert].bfloat16()
            del tensors[f"{expert}_scale_inv"]
            save_file(tensors, path, {"format": "pt"})
    flags = ("--pp-size", "2", "--trust-remote-code", "--max-total-tokens", "4096")
    log = start(checkpoint, *flags, "--port", str(free_port()), before_weights=False)
    assert log.count(f"{expert} is torch.bfloat16: experts of an MXFP8 checkpoint must be quantised") == 1


@pytest.fixture
def running(tiny: Path, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    log = tmp_path / "server.log"
    with serving(log, environ={"TINY": str(tiny)}, quiet=True) as url:
        yield url, log


def test_a_killed_worker_ends_the_server_and_its_requests(running: tuple[str, Path]) -> None:
    url, log = running
    port = int(url.rsplit(":", 1)[1])
    (server,) = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
    process = psutil.Process(server)
    (worker,) = [child for child in process.children(recursive=True) if "scheduler" in child.name()]
    body = {
        "input_ids": [5, 6],
        "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": True},
        "stream": True,
    }
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=120) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith(b"data: ")
        os.kill(worker.pid, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(requests.RequestException):
            for line in lines:
                assert b"[DONE]" not in line
            raise requests.ConnectionError("ended without [DONE]")
    process.wait(timeout=120)
    assert time.monotonic() - begin < 120
    assert "scheduler" in log.read_text(errors="replace")[-5000:].lower()
