"""The machine that the doctor speaks of: this one, or a named one."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sglang_m3 import hardware

MIB = 2**20
TAKEN_BEFORE_WEIGHTS = 1342 * MIB
"""Bytes of a GPU that driver and CUDA have before weights load, for machines that are not here: measured on
one H200. NCCL takes some more where there are several ranks."""


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU: compute capability, and the memory that nvidia-smi shows."""

    name: str
    capability: tuple[int, int]
    total_bytes: int


GPUS = {
    "h200": Gpu("NVIDIA H200", (9, 0), 143_771 * MIB),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 81_559 * MIB),
    "b200": Gpu("NVIDIA B200", (10, 0), 183_359 * MIB),
}


@dataclass(frozen=True)
class Machine:
    """What decides how a server would run.

    Attributes:
        name: for people.
        gpu: None without a GPU.
        gpus: how many.
        free_bytes: of one GPU before weights load, or of the host without a GPU.
        here: whether it is this machine.
    """

    name: str
    gpu: Gpu | None
    gpus: int
    free_bytes: int
    here: bool

    @property
    def target(self) -> hardware.Target | None:
        """What the plugin takes it for, see `hardware.target`."""
        if self.here:
            return hardware.target()
        if self.gpu is None:
            return "cpu"
        return "sm90" if self.gpu.capability == (9, 0) else None


def named(name: str) -> Machine:
    """`cpu`, or a kind of GPU and their number: `h200x8`.

    Raises:
        ValueError: another name.
    """
    if name == "cpu":
        return Machine(name, None, 0, _host_memory(), here=False)
    match = re.fullmatch(rf"({'|'.join(GPUS)})x([1-9][0-9]?)", name)
    if match is None:
        raise ValueError(
            f"{name!r} is no machine that is known; pass cpu, or {', '.join(GPUS)} x a number: h200x8"
        )
    gpu = GPUS[match[1]]
    return Machine(name, gpu, int(match[2]), gpu.total_bytes - TAKEN_BEFORE_WEIGHTS, here=False)


def this_machine() -> Machine:
    """This machine's GPUs, or its host memory where it has none."""
    if not torch.cuda.is_available():
        return Machine("this machine, without a GPU", None, 0, _host_memory(), here=True)
    count = torch.cuda.device_count()
    free, total = torch.cuda.mem_get_info(0)
    gpu = Gpu(torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0), total)
    return Machine(f"this machine, {count} x {gpu.name}", gpu, count, free, here=True)


def _host_memory() -> int:
    import psutil

    return psutil.virtual_memory().available


@contextlib.contextmanager
def pretending(machine: Machine) -> Iterator[None]:
    """Within it, SGLang and the plugin resolve server arguments as on `machine`."""
    if machine.here:
        yield
        return
    from sglang.srt.arg_groups import kv_shard_hook, memory_hook
    from sglang.srt.model_executor import cuda_graph_config
    from sglang.srt.runtime_context import override_platform

    from sglang_m3.quantization import layout

    total = None if machine.gpu is None else machine.gpu.total_bytes / MIB

    def memory_capacity(device: str | None = None) -> float | None:
        return total

    # What is installed here is taken to be installed there.
    installed = importlib.util.find_spec("deep_gemm") is not None
    replaced = [
        (hardware, "target", lambda: machine.target),
        (
            cuda_graph_config,
            "default_prefill_backend",
            lambda: "disabled" if machine.gpu is None else "breakable",
        ),
        (layout, "has_deep_gemm", lambda: machine.target == "sm90" and installed),
    ]
    for module in (memory_hook, kv_shard_hook):
        replaced.append((module, "get_device_memory_capacity", memory_capacity))
    with contextlib.ExitStack() as stack:
        for module, name, value in replaced:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        stack.enter_context(override_platform(**_facts(machine)))
        yield


def _facts(machine: Machine) -> dict[str, Any]:
    """SGLang's platform facts (`sglang.srt.runtime_context.PlatformContext`)."""
    capability = (0, 0) if machine.gpu is None else machine.gpu.capability
    others = ("is_hip", "is_npu", "is_xpu", "is_musa", "is_mps", "is_sm110", "is_sm120", "has_amx")
    hopper, blackwell = capability == (9, 0), capability[0] == 10
    return {
        **dict.fromkeys(others, False),
        "is_cuda": machine.gpu is not None,
        "has_flashinfer": machine.gpu is not None,
        "is_sm90": hopper,
        "is_hopper_with_cuda_12_3": hopper,
        "is_sm100": blackwell,
        "is_sm100_or_sm110": blackwell,
        "is_blackwell": blackwell,
        "device_capability": capability,
        "device_sm": capability[0] * 10 + capability[1],
    }
