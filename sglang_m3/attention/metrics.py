"""Selection counters in SGLang's decode log line and in `/metrics`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_m3.attention.counters import SelectionCounters, SelectionTotals

_DECODE_PREFIX = "Decode batch"
_REPORTER_LOGGER = "sglang.srt.managers.scheduler_components.metrics_reporter"

METRICS = {
    "pages_scored": (
        "sglang:m3_index_pages_scored",
        "Index pages to score, each once for the requests that share it, per sparse layer.",
    ),
    "pages_saved": (
        "sglang:m3_index_pages_saved",
        "Index page loads that sharing a prefix saved, per sparse layer.",
    ),
    "rows": ("sglang:m3_rows", "Query tokens that chose blocks, per sparse layer."),
}
"""Field of `SelectionTotals` -> (Prometheus counter, without `_total`; help text)."""


class _Publisher:
    """Takes totals from the counters of this process's model to the log and to Prometheus."""

    def __init__(self, counters: SelectionCounters) -> None:
        self.counters = counters
        self._published = SelectionTotals(0, 0, 0)
        self._prometheus: dict[str, Any] | None = None

    def log_suffix(self, totals: SelectionTotals) -> str:
        return (
            f", index pages scored: {totals.pages_scored}, saved by sharing: {totals.pages_saved}, "
            f"rows: {totals.rows}"
        )

    def publish(self, reporter: Any) -> None:
        """Bring the Prometheus counters up to date, where `--enable-metrics` made this rank report."""
        if not reporter.current_scheduler_metrics_enabled or not self.counters.unpublished:
            return
        labels = reporter.metrics_collector.labels
        if self._prometheus is None:
            # SGLang sets the multi-process directory first, so the client is imported late.
            from prometheus_client import Counter

            self._prometheus = {
                field: Counter(name=name, documentation=text, labelnames=labels.keys())
                for field, (name, text) in METRICS.items()
            }
        totals = self.counters.read()
        # A step may still be running on another stream: done only when two reads agree.
        self.counters.unpublished = totals != self._published
        for field, counter in self._prometheus.items():
            counter.labels(**labels).inc(getattr(totals, field) - getattr(self._published, field))
        self._published = totals


_publisher: _Publisher | None = None


class _DecodeLineFilter(logging.Filter):
    """Appends the totals to SGLang's decode line."""

    def filter(self, record: logging.LogRecord) -> bool:
        if _publisher is not None and isinstance(record.msg, str) and record.msg.startswith(_DECODE_PREFIX):
            record.msg += _publisher.log_suffix(_publisher.counters.read())
        return True


def publish_from(counters: SelectionCounters) -> None:
    """Report the counters of the model that this process serves."""
    global _publisher
    if _publisher is None:
        logging.getLogger(_REPORTER_LOGGER).addFilter(_DecodeLineFilter())
    _publisher = _Publisher(counters)


def around_decode_report(original: Callable[..., None], reporter: Any, *args: Any, **kwargs: Any) -> None:
    """Around `report_decode_stats`, which runs every step and reports every `--decode-log-interval` steps."""
    original(reporter, *args, **kwargs)
    if _publisher is not None and reporter.forward_ct_decode % reporter.decode_log_interval == 0:
        _publisher.publish(reporter)


def after_idle_report(result: None, reporter: Any) -> None:
    """After `_maybe_log_idle_metrics`, so that the last steps before a pause are not missing."""
    if _publisher is not None:
        _publisher.publish(reporter)
