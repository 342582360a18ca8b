"""An HTTP port that is taken stops an M3 server before weights load, not after."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.plugins.hook_registry import HookType

from sglang_m3.attention.parameters import serves


class PortTakenError(OSError):
    """The port that a server should listen on cannot be had; names it."""


def check_port(host: str, port: int) -> None:
    """Check that a server could listen there now.

    Raises:
        PortTakenError: it could not.
    """
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind, protocol) as probe:
            # As uvicorn does: connections of a server that has just ended do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise PortTakenError(
            f"cannot listen on {host}, port {port} ({error.strerror}); end its user or pass another --port"
        ) from error


def around_launch_server(original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the start of an HTTP server; engines without one do not come here."""
    view = resolving_view(server_args)
    if serves(model_config_of(server_args)):
        check_port(view.host, view.port)
    return original(server_args, *args, **kwargs)


HOOKS = (("sglang.srt.entrypoints.http_server.launch_server", around_launch_server, HookType.AROUND),)
"""(target, hook, type). Acts for M3 models only."""
