"""What the sm90 selection kernels share: launch facts and workspace arithmetic."""

from __future__ import annotations

import functools
import os

import torch
import triton
from torch import Tensor

INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""The kernels run in Triton's interpreter: no inline assembly there, and dot products in float32 only."""

WORKSPACE_ALIGNMENT = 128
"""Bytes; every part of a workspace begins at a multiple of it, so that kernels see one pointer alignment."""


def early_launch(early: bool) -> dict[str, bool]:
    """Launch options of a kernel that calls `gdc_wait`: it may be set up while its predecessor still runs."""
    return {"launch_pdl": True} if early and not INTERPRETING else {}


def aligned(size: int) -> int:
    """Bytes that a part of `size` bytes takes in a workspace."""
    return triton.cdiv(size, WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the GPU; a small number in the interpreter, whose programs run one by one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def check_workspace(workspace: Tensor, needed: int) -> None:
    """A workspace is a contiguous uint8 tensor of at least `needed` bytes, aligned like an allocation."""
    assert workspace.dtype == torch.uint8 and workspace.dim() == 1 and workspace.is_contiguous()
    assert workspace.numel() >= needed, f"workspace has {workspace.numel()} bytes, needs {needed}"
    assert workspace.data_ptr() % 16 == 0
