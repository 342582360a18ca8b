"""Runs before any test module: Triton's interpreter, where there is no GPU, before anything imports Triton.

Other tests import SGLang, and with it Triton, which reads `TRITON_INTERPRET` then. Servers that tests start
must not inherit the variable (`launch.server`).
"""

from __future__ import annotations

import pytest

from tests.kernels import sm90  # noqa: F401


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
