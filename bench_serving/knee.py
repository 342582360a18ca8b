"""The highest concurrency that meets a latency target, by bisection."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bench_serving.workload import Workload


@dataclass(frozen=True)
class Target:
    """What a request may take.

    Attributes:
        tokens_per_second: at least this many, per request, after its first token.
        first_token_seconds: at most this long to the first token.
        quantile: "median" or "p95" of the requests must meet both.
    """

    tokens_per_second: float
    first_token_seconds: float
    quantile: str = "median"

    def met(self, record: dict[str, Any]) -> bool:
        """Whether a measured point (`measure`'s record) meets the target; a failed request never does."""
        if record["failed"]:
            return False
        return (
            record[f"{self.quantile}_tpot_ms"] <= 1e3 / self.tokens_per_second
            and record[f"{self.quantile}_ttft_ms"] <= 1e3 * self.first_token_seconds
        )


def probes(meets: Callable[[int], bool], most: int) -> Iterator[tuple[int, bool]]:
    """The concurrencies tried, each with whether it met the target: doubling from 1, then bisection.

    The last that met it is the knee, if meeting it is monotone in the concurrency; `most` bounds it. At most
    2 log2(most) + 2 are tried, none twice.
    """
    good, tried = 0, 1
    bad = most + 1
    while tried < bad:
        fits = meets(tried)
        yield tried, fits
        if not fits:
            bad = tried
            break
        good, tried = tried, min(2 * tried, most)
        if good == most:
            return
    while bad - good > 1:
        middle = (good + bad) // 2
        fits = meets(middle)
        yield middle, fits
        good, bad = (middle, bad) if fits else (good, middle)


def main(chosen: argparse.Namespace, load: Workload, corpus_of: Callable[[str], Any]) -> int:
    """Find the knee of the server at `chosen.url` and print it with every concurrency tried."""
    from bench_serving import server
    from bench_serving.measure import Load, measure, warm_prefixes, warm_up

    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
    target = Target(chosen.tokens_per_s, chosen.first_token_s, chosen.quantile)
    (variation,) = load.variations()[-1:]
    made = Load.of(variation, corpus_of(server.info(chosen.url)["model_path"]), chosen.seed)
    server.flush_cache(chosen.url)
    warm_prefixes(chosen.url, made)

    def meets(concurrency: int) -> bool:
        try:
            warm_up(chosen.url, made, concurrency)
        except RuntimeError as error:
            print(f"{concurrency:4} at once: warming up failed: {error}", flush=True)
            return False
        record, _ = measure(chosen.url, made, concurrency, title=f"{load.name} at {concurrency}")
        fits = target.met(record)
        if chosen.out:
            with chosen.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"max_concurrency": concurrency, "met": fits, **record}) + "\n")
        if record["failed"]:
            print(
                f"{concurrency:4} at once: {record['failed']} requests failed: {record['errors']}", flush=True
            )
            return False
        each = 1e3 / max(record[f"{chosen.quantile}_tpot_ms"], 1e-9)
        first = record[f"{chosen.quantile}_ttft_ms"] / 1e3
        print(
            f"{concurrency:4} at once: {each:.1f} tokens/s each, first token {first:.2f} s: "
            f"{'meets' if fits else 'misses'} the target",
            flush=True,
        )
        return fits

    met = [concurrency for concurrency, fits in probes(meets, chosen.most) if fits]
    asked = (
        f"{target.tokens_per_second:g} tokens/s each and {target.first_token_seconds:g} s to the first token "
        f"({target.quantile})"
    )
    if not met:
        print(f"no concurrency meets {asked}")
        return 1
    bound = f" (the highest tried, --most {chosen.most})" if max(met) == chosen.most else ""
    print(f"knee: {max(met)} in flight{bound} with {asked}")
    return 0
