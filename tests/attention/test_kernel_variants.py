"""Start-up has every variant of the attention kernels compiled that a step can need."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def test_no_step_launches_a_kernel_that_the_warm_up_has_not_launched_alike() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.attention.kernel_variants"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    for variants, beyond in found["full"]:
        assert variants > 50, "launches are not written down"
        assert not beyond, "\n".join(beyond[:10])
    assert found["too_little"][1], "a warm-up of one step would pass as well"
