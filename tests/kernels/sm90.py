"""Where the sm90 kernels' tests run: on an sm90 GPU if there is one, otherwise in Triton's interpreter."""

from __future__ import annotations

import os

import torch

REAL = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
if not REAL:
    # Read when a kernel is defined, so before any of them is imported.
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = torch.device("cuda" if REAL else "cpu")
EXAMPLES = 60 if REAL else 6
"""Random steps per property: the interpreter takes a second for what the GPU does in a millisecond."""

from m3_kernels.prefix_plan import PrefixPlan  # noqa: E402
from m3_kernels.rows import Rows  # noqa: E402
from m3_kernels.triton.sm90_plan_prefix import plan_prefix, plan_prefix_workspace_bytes  # noqa: E402
from torch import Tensor  # noqa: E402

from tests.kernels.cases import Step  # noqa: E402


def on_device(step: Step) -> tuple[Tensor, Rows]:
    """The step's page table and rows on the device."""
    rows = Rows(step.rows.request.to(DEVICE), step.rows.position.to(DEVICE))
    return step.page_table.to(DEVICE), rows


def poisoned(size: int) -> Tensor:
    """A workspace of exactly `size` bytes that holds nothing useful."""
    return torch.full((size,), 0xA5, dtype=torch.uint8, device=DEVICE)


def plan_of(page_table: Tensor, rows: Rows) -> PrefixPlan:
    """The sm90 plan in a workspace of exactly the promised size."""
    workspace = poisoned(plan_prefix_workspace_bytes(len(rows), page_table.shape[0]))
    return plan_prefix(page_table, rows, workspace=workspace)
