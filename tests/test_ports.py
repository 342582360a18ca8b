"""A taken port is found before weights load."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_m3 import ports


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def launched(monkeypatch: pytest.MonkeyPatch, architecture: str, port: int) -> list[Any]:
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]), quantization=None)
    monkeypatch.setattr(ports, "model_config_of", lambda _: config)
    calls: list[Any] = []
    args = SimpleNamespace(host="127.0.0.1", port=port)
    ports.around_launch_server(lambda *given, **named: calls.append((given, named)), args, 1, x=2)
    assert calls == [((args, 1), {"x": 2})]
    return calls


def test_a_taken_port_stops_m3_and_no_other_model(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    with pytest.raises(ports.PortTakenError, match=rf"127\.0\.0\.1, port {taken} \(Address already in use\)"):
        launched(monkeypatch, "MiniMaxM3SparseForCausalLM", taken)
    launched(monkeypatch, "LlamaForCausalLM", taken)


def test_a_free_port_starts(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert launched(monkeypatch, "MiniMaxM3SparseForCausalLM", port), "SGLang's own start was not called"


def test_a_port_of_a_closed_connection_is_free() -> None:
    """A server that was restarted finds connections of the one before in TIME_WAIT."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = listener.accept()
        accepted.close()
        client.close()
    ports.check_port("127.0.0.1", port)


def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(ports.PortTakenError, match=r"192\.0\.2\.1"):
        ports.check_port("192.0.2.1", 30000)
