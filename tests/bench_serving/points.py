"""Measured points as `points.jsonl` holds them, for tests of what is made of them."""

from __future__ import annotations

import time
from typing import Any

NOW = time.time()


def point(variant: str = "ours", **changed: Any) -> dict[str, Any]:
    """A point with every field that summaries read."""
    return {
        "variant": variant,
        "workload": "agentic-60k",
        "digest": "aa",
        "prefix_tokens": 60_000,
        "shared_share": 1.0,
        "max_concurrency": 8,
        "concurrency": 6.6,
        "repeat": 0,
        "round": 0,
        "seed": 0,
        "time": NOW,
        "machine": "a machine",
        "code": "1234abcd",
        "environment": {},
        "flags": ["--model-path", "m"],
        "model_note": "",
        "requests": 32,
        "failed": 0,
        "errors": {},
        "output_throughput": 100.0,
        "median_ttft_ms": 50.0,
        "median_tpot_ms": 10.0,
        "p50_itl_ms": 9.0,
        "p95_itl_ms": 12.0,
        "p99_itl_ms": 20.0,
        "cached_share": 0.9,
        "overlap": 0.95,
        "prompt_tokens": 32 * 60_600,
        "cached_tokens": 32 * 60_000,
        "index_pages_scored": 100,
        "index_pages_saved": 300,
        "peak_memory_bytes": 2e9,
        "client_core_share": 0.006,
        "client_cpu_us_per_request": 2500.0,
        "client_cpu_us_per_event": 15.0,
        "max_total_num_tokens": 4096,
        "server_memory_gb": {"weight": 1.0, "kvcache": 2.0, "graph": {"decode": 0.25, "prefill": 0.5}},
    } | changed


def failed(variant: str, **changed: Any) -> dict[str, Any]:
    """A point of which every request failed: it has no measures."""
    made = point(variant, failed=32, errors={"it broke": 32}, **changed)
    return {name: value for name, value in made.items() if not name.endswith("_ms")}


def output(variant: str, ids: dict[str, list[int]], **changed: Any) -> dict[str, Any]:
    """A line of `outputs.jsonl`."""
    names = (
        "variant", "workload", "digest", "prefix_tokens", "shared_share", "max_concurrency", "repeat",
        "round", "seed", "time",
    )  # fmt: skip
    made = point(variant, **changed)
    return {name: made[name] for name in names} | {"ids": ids}
