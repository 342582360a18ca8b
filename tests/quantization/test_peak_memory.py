"""Loading hardly holds more than what stays: tensors are quantised, and brought into a layout, one by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_m3.quantize import quantize_checkpoint
from sglang_m3.tiny import TinyConfig, build

pytestmark = pytest.mark.long

MANY_EXPERTS = TinyConfig(
    layers=2, vocab=512, vision_layers=1, hidden=256, expert_intermediate=256, experts=500, max_position=4096
)
"""As in M3, no tensor is more than a small part of all, nor are Python's objects."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    plain = build(tmp_path_factory.mktemp("peak") / "plain", MANY_EXPERTS)
    return {"BF16": plain, "MXFP8": quantize_checkpoint(plain, plain.parent / "converted")}


@pytest.mark.parametrize("layout", ["exact", "fast"])
@pytest.mark.parametrize("origin", ["BF16", "MXFP8"])
def test_loading_takes_at_most_a_tenth_more_than_what_stays(
    checkpoints: dict[str, Path], origin: str, layout: str
) -> None:
    command = [sys.executable, "-m", "tests.quantization.peak_memory", str(checkpoints[origin])]
    # What malloc keeps for later, as `make test` has it, would be counted as held.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    ran = subprocess.run(
        [*command, "mxfp8"] if origin == "BF16" else command,
        env={
            **inherited,
            "SGLANG_M3_MXFP8": layout,
            "MALLOC_MMAP_THRESHOLD_": "16384",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    print(f"{origin}, {layout}: {found}, {found['peak'] / found['resident']:.3f}")
    assert 50 << 20 < found["resident"] < 1.02 * found["peak"], "the whole model is counted"
    assert found["peak"] < 1.1 * found["resident"], (
        f"{found['peak'] / found['resident']:.3f} times what stays"
    )
