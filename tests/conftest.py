"""Runs before any test module: Triton's interpreter, where there is no GPU, before anything imports Triton.

Other tests import SGLang, and with it Triton, which reads `TRITON_INTERPRET` then. Servers that tests start
must not inherit the variable (`launch.server`).
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.kernels import sm90  # noqa: F401

ROOT = Path(__file__).parents[1]


class ByServer(LoadScopeScheduling):
    """Gives a worker whole groups of files: those that share a server, by their `xdist_group`.

    pytest-xdist's own `--dist loadgroup` says so in test ids, which pytest 9.2 no longer lets it change.
    """

    def _split_scope(self, nodeid: str) -> str:
        return _group_of_file(nodeid.split("::")[0])


@functools.cache
def _group_of_file(path: str) -> str:
    named = re.search(r'xdist_group\("([^"]+)"\)', (ROOT / path).read_text(encoding="utf-8"))
    return path if named is None else named[1]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByServer | None:
    """For `--dist loadgroup`."""
    return ByServer(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file run in one process, and those with a server first: they take longest.

    Files that share a server name a group (`pytest.mark.xdist_group`), and run one after another.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.split("::")[0]))
    place = {name: at for at, name in enumerate(dict.fromkeys(map(group_of, items)))}
    with_server = {group_of(item) for item in items if item.get_closest_marker("server")}
    items.sort(key=lambda item: (group_of(item) not in with_server, place[group_of(item)]))


def group_of(item: pytest.Item) -> str:
    """The name of the tests that run in one process with this one."""
    return item.get_closest_marker("xdist_group").args[0]
