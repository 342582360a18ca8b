"""A server that does not get healthy in its time is stopped, and said to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.server import ServerDiedError, running


def test_the_start_limit_is_the_caller_s(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    command = ("bash", "-c", "echo loading; exec sleep 60")
    with (
        pytest.raises(ServerDiedError, match=r"not healthy after 0.3 s(.|\n)*loading"),
        running(command, log, start_limit=0.3),
    ):
        pass
