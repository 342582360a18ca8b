"""What the server says it saved: index pages that rows with a common prefix loaded once."""

from __future__ import annotations

import time
from dataclasses import dataclass

from launch.server import metric


@dataclass(frozen=True)
class IndexPages:
    """Pages of index keys per sparse layer, since the server started or since an earlier count.

    Attributes:
        scored: pages loaded.
        saved: loads that sharing made unnecessary.
    """

    scored: float
    saved: float

    def since(self, before: IndexPages) -> IndexPages:
        return IndexPages(self.scored - before.scored, self.saved - before.saved)

    def __str__(self) -> str:
        share = self.saved / max(1.0, self.scored + self.saved)
        return f"index pages scored: {self.scored:.0f}, saved by sharing: {self.saved:.0f} ({share:.0%})"


def index_pages(url: str) -> IndexPages:
    """The counters of the server at `url`; it needs `--enable-metrics`.

    Read when they stopped growing: the last steps are counted when the server is idle.
    """
    value = _read(url)
    while True:
        time.sleep(0.5)
        again = _read(url)
        if again == value:
            return value
        value = again


def _read(url: str) -> IndexPages:
    names = ("scored", "saved")
    return IndexPages(*(metric(url, f"sglang:m3_index_pages_{name}_total") for name in names))
