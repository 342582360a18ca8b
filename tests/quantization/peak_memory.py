"""How much memory loading a checkpoint takes, at most and afterwards, on the CPU.

    MALLOC_MMAP_THRESHOLD_=16384 python -m tests.quantization.peak_memory CHECKPOINT [QUANTIZATION]

Prints JSON: bytes that the process's own memory (without the pages of mapped files) grew by at most, after a
small checkpoint has made SGLang import what it needs; and bytes of parameters, buffers and scales.
The layout is that of `SGLANG_M3_MXFP8`.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import tempfile
import threading
from pathlib import Path

from torch.nn import Module

from sglang_m3.tiny import build
from tests.quantization.conftest import SMALL, loader_of

POLL_SECONDS = 0.001


def own_bytes() -> int:
    """Anonymous memory of this process."""
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def resident_bytes(model: Module) -> int:
    """Parameters, buffers, and the scales that a layout adds."""
    held = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        held += (getattr(module, "block_scales", None) or {}).values()
        held.append(getattr(module, "weight_block_scale", None))
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in held if tensor is not None}.values())


def main() -> None:
    flags = {"quantization": sys.argv[2]} if len(sys.argv) > 2 else {}
    with loader_of("plugin's model file") as load:
        with tempfile.TemporaryDirectory() as folder:
            load(build(Path(folder) / "small", SMALL), quantization="mxfp8")
        gc.collect()
        before = peak = own_bytes()
        done = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(POLL_SECONDS):
                peak = max(peak, own_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        model = load(Path(sys.argv[1]), **flags)
        done.set()
        watcher.join()
        print(json.dumps({"peak": peak - before, "resident": resident_bytes(model)}))


if __name__ == "__main__":
    main()
