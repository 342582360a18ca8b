"""Plugins for SGLang that only the servers of tests have."""

from __future__ import annotations

import os
from pathlib import Path

from launch.server import ROOT


def installed(scratch: Path, *modules: str) -> dict[str, str]:
    """The environment in which a server finds the `register` functions of `modules` as plugins of SGLang."""
    plugins = scratch / "plugins"
    info = plugins / "test_plugins-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: test-plugins\nVersion: 0\n")
    lines = [f"{module.rpartition('.')[2]} = {module}:register" for module in modules]
    (info / "entry_points.txt").write_text("\n".join(("[sglang.srt.plugins]", *lines, "")))
    return {"PYTHONPATH": os.pathsep.join((str(plugins), str(ROOT)))}
