"""How much index work was done, and how much sharing saved."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from m3_kernels.prefix_plan import PrefixPlan


@dataclass(frozen=True)
class SelectionTotals:
    """Since the server started, one sparse layer's worth (every sparse layer does the same work).

    Attributes:
        pages_scored: index pages of the plans' spans. Of these a row that sees no more blocks than it chooses
            needs none, and a span of many rows loads some more than once.
        pages_saved: index pages that would have been loaded besides, had every request loaded its own.
        rows: query tokens that chose blocks.
    """

    pages_scored: int
    pages_saved: int
    rows: int


class SelectionCounters:
    """Accumulates a plan's counters on the device; reading them is the only host synchronisation."""

    def __init__(self, device: torch.device | str) -> None:
        self._totals = torch.zeros(3, dtype=torch.int64, device=device)
        self.unpublished = False
        """Whether a step ran whose count may not be published yet. Set by the backend, since a replayed graph
        counts by itself; cleared by the publisher."""

    def count(self, plan: PrefixPlan) -> None:
        """Add one step. Capturable in a CUDA graph."""
        self._totals += plan.counters

    def read(self) -> SelectionTotals:
        """Copy the totals to the host."""
        return SelectionTotals(*self._totals.tolist())
