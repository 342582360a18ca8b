"""Measures one point: a workload at one concurrency against a running server."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sglang.benchmark.datasets.common import DatasetRow
from sglang.benchmark.serving import calculate_metrics
from tqdm import tqdm

from bench_serving import client, server
from bench_serving.corpus import Corpus
from bench_serving.memory import MemorySampler
from bench_serving.sessions import PrefixTree, Session, Turn, other_text, overlap, prefix_tree, sessions
from bench_serving.stream import Answer
from bench_serving.workload import Workload

WARM_OUTPUT_TOKENS = 16
WARM_PASSES = 6
WARM_SESSIONS = 16
WARM_PRIVATE_TOKENS = 1 << 16
"""Sessions of a warm-up pass at most, and their tokens that no cache holds; more only where more are sent at
once."""
STILL_IMPROVING = 0.9
SHOWN_ERRORS = 3


@dataclass(frozen=True)
class Load:
    """A workload's variation with its prefix tree, ready to be sent."""

    workload: Workload
    tree: PrefixTree
    corpus: Corpus
    seed: int

    @classmethod
    def of(cls, workload: Workload, corpus: Corpus, seed: int) -> Load:
        return cls(workload, prefix_tree(workload, corpus, seed), corpus, seed)

    def sessions(self, concurrency: int, label: str, count: int | None = None) -> tuple[Session, ...]:
        """The sessions of a point. Another `label` gives other private text, so nothing of it is cached."""
        return sessions(
            self.workload,
            self.tree,
            self.corpus,
            count=count or self.workload.sessions(concurrency),
            seed=f"{self.seed} {self.workload.digest} {concurrency} {label}",
        )


def warm_prefixes(url: str, load: Load, until: float = float("inf")) -> float:
    """Put every path of the prefix tree into the cache, one after the other; returns the seconds it took.

    Raises:
        RuntimeError: a request failed, or was not answered at `until` on `time.monotonic`'s clock.
    """
    turn = Turn(branches=((),), output_tokens=1, think_seconds=0.0)
    paths = [Session(key, path, len(path), (turn,)) for key, path in enumerate(load.tree.paths)]
    if not paths:
        return 0.0
    return _must_succeed(client.drive(url, paths, 1, until=until)).seconds


def warm_up(
    url: str,
    load: Load,
    concurrency: int,
    *,
    repeat: int = 0,
    passes: int | None = None,
    until: float = float("inf"),
) -> list[float]:
    """Send a point's requests with other text until compilation is over; returns the seconds of each pass.

    A pass has the lengths of the first sessions that `measure` sends, one per slot and more where they are
    short, since kernels are also compiled for what a length can be divided by. Its answers are short, so in
    later turns only the new text is as long. It is over when a pass is no longer more than a tenth faster
    than the one before, after `passes` at the latest, which by default are `WARM_PASSES`.

    Raises:
        RuntimeError: a request failed, or was not answered at `until` on `time.monotonic`'s clock.
    """
    point = _first(load.sessions(concurrency, f"repeat {repeat}"), concurrency)
    seconds: list[float] = []
    while len(seconds) < (passes or WARM_PASSES):
        label = f"{load.workload.digest} {concurrency} {repeat} warm {len(seconds)}"
        wave = other_text(point, load.corpus, f"{load.seed} {label}")
        seconds.append(send_short(url, wave, concurrency, until))
        if len(seconds) > 1 and seconds[-1] > STILL_IMPROVING * seconds[-2]:
            break
    return seconds


def _first(point: Sequence[Session], concurrency: int) -> list[Session]:
    """What a warm-up pass takes the lengths of."""
    chosen, private = [], 0
    for session in point[: max(concurrency, WARM_SESSIONS)]:
        private += session.private_tokens
        if len(chosen) >= concurrency and private > WARM_PRIVATE_TOKENS:
            break
        chosen.append(session)
    return chosen


def send_short(url: str, sessions: Iterable[Session], concurrency: int, until: float = float("inf")) -> float:
    """Send sessions with short answers and no pauses; returns the seconds. Raises as `warm_up` does."""
    short = [replace(session, turns=tuple(map(_short, session.turns))) for session in sessions]
    return _must_succeed(client.drive(url, short, concurrency, until=until)).seconds


def measure(
    url: str, load: Load, concurrency: int, *, repeat: int = 0, title: str = ""
) -> tuple[dict[str, Any], client.Drive]:
    """Run one point; returns its record and the answers.

    The record has the keys of SGLang's benchmark (times in ms, rates per second; failed requests are in none
    of them) and: requests, failed, errors, overlap, cached tokens, the plugin's counters, peak memory, and
    the CPU this tool used.
    """
    point = load.sessions(concurrency, f"repeat {repeat}")
    total = sum(session.requests for session in point)
    before = server.counters(url)
    with (
        tqdm(total=total, desc=title, unit="request", leave=False, mininterval=1.0) as bar,
        MemorySampler(url) as memory,
    ):

        def answered(answer: Answer) -> None:
            bar.update()
            if not answer.looks_complete:
                tqdm.write("a request failed; why is said when the point is over")

        driven = client.drive(url, point, concurrency, on_answer=answered)
    grown = server.counters(url).since(before)
    shared = overlap(load.tree, point)
    outputs = [exchange.output for exchange in driven.exchanges]
    served = [output for output in outputs if output.success]
    prompt_tokens = sum(output.prompt_len for output in served)
    cached_tokens = sum(output.cached_tokens for output in served)
    errors = collections.Counter(_last_line(output.error) for output in outputs if not output.success)
    record = {
        "sessions": len(point),
        "requests": total,
        "failed": total - len(served),
        "errors": dict(errors.most_common(SHOWN_ERRORS)),
        "duration": driven.seconds,
        "overlap": shared.fraction,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "cached_share": cached_tokens / max(1, prompt_tokens),
        "index_pages_scored": grown.pages_scored,
        "index_pages_saved": grown.pages_saved,
        "index_rows": grown.rows,
        "memory_kind": memory.memory.kind,
        "peak_memory_bytes": memory.memory.peak_bytes,
        "streamed_events": driven.events,
        "client_cpu_seconds": driven.client_cpu_seconds,
        "process_cpu_seconds": driven.process_cpu_seconds,
        "client_core_share": driven.client_cpu_seconds / driven.seconds,
        "client_cpu_us_per_request": 1e6 * driven.client_cpu_seconds / total,
        "client_cpu_us_per_event": 1e6 * driven.client_cpu_seconds / max(1, driven.events),
    }
    return record | (_metrics(outputs, driven.seconds) if served else {}), driven


def _last_line(error: str) -> str:
    return error.strip().splitlines()[-1][:300]


class _NoText:
    """In a tokenizer's place: SGLang's metrics count the tokens of texts again, and ours are counted ids."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return []


def _metrics(outputs: Sequence[client.RequestFuncOutput], seconds: float) -> dict[str, float]:
    """SGLang's metrics over the successful requests."""
    rows = [DatasetRow(None, output.prompt_len, output.output_len) for output in outputs]
    metrics, _ = calculate_metrics(rows, list(outputs), seconds, _NoText(), "sglang")
    record = {name: float(value) for name, value in asdict(metrics).items() if "retokenized" not in name}
    gaps = sorted(gap for output in outputs if output.success for gap in output.itl)
    record["p50_itl_ms"] = 1e3 * gaps[len(gaps) // 2] if gaps else 0.0
    return record


def _short(turn: Turn) -> Turn:
    return replace(turn, output_tokens=min(turn.output_tokens, WARM_OUTPUT_TOKENS), think_seconds=0.0)


def _must_succeed(driven: client.Drive) -> client.Drive:
    failed = [exchange.output.error for exchange in driven.exchanges if not exchange.output.success]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(driven.exchanges)} warm-up requests failed: {failed[0]}")
    return driven
