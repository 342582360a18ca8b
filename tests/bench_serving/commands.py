"""Commands of the tool for fake servers: small, with random ids."""

from __future__ import annotations

from pathlib import Path

FLAGS = ["--", "--model-path", "m"]


OWN = {"compare": ["--concurrency", "1,2", "--rounds", "1"], "run": ["--concurrency", "1,2"], "knee": []}


def arguments(command: str, folder: Path, *more: str) -> list[str]:
    return [
        command, "--workload", "agentic-60k", "--scale", "0.01",
        "--requests-per-slot", "1", "--least-sessions", "2", "--prompts", "random", "--vocab", "500",
        "--out", str(folder), *OWN[command], *more,
    ]  # fmt: skip
