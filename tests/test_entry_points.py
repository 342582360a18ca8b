"""How SGLang finds the plugin, and how a user turns it off."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, PLATFORM_PLUGINS_GROUP, load_plugins_by_group

import sglang_m3
from sglang_m3 import hardware

GROUPS = {GENERAL_PLUGINS_GROUP: sglang_m3.register, PLATFORM_PLUGINS_GROUP: sglang_m3.activate}


@pytest.mark.parametrize("group", GROUPS)
def test_one_name_in_both_groups_which_sglang_plugins_turns_off(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    function, _ = load_plugins_by_group(group)["sglang_m3"]
    assert function is GROUPS[group]
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    assert load_plugins_by_group(group) == {}


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = "import sglang_m3, sys; print([m for m in ('torch', 'sglang', 'triton') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("target", [None, "sm90", "cpu"])
def test_the_cpu_platform_is_for_machines_without_an_accelerator_only(
    monkeypatch: pytest.MonkeyPatch, target: str | None
) -> None:
    monkeypatch.setattr(hardware, "target", lambda: target)
    assert (sglang_m3.activate() is not None) == (target == "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the target is a GPU")
@pytest.mark.parametrize(("cpu_engine", "target"), [("0", "cpu"), ("1", None)])
def test_sglangs_own_cpu_engine_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, cpu_engine: str, target: str | None
) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", cpu_engine)
    assert hardware.target.__wrapped__() == target
