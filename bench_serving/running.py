"""Loads a server that runs already."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from bench_serving import server
from bench_serving.compare import line
from bench_serving.corpus import Corpus
from bench_serving.measure import Load, measure, warm_prefixes, warm_up
from bench_serving.server import Variant
from bench_serving.store import Store, key
from bench_serving.workload import Workload


def run(
    chosen: argparse.Namespace, workloads: tuple[Workload, ...], corpus_of: Callable[[str], Corpus]
) -> bool:
    """Measure every point of the workloads on the server at `chosen.url`; its cache is emptied first.

    Raises:
        RuntimeError: a warm-up request failed.
    """
    arguments = server.info(chosen.url)
    variant = Variant(chosen.name, (), ("--model-path", arguments["model_path"]))
    corpus, store = corpus_of(arguments["model_path"]), Store(chosen.out)
    # Private text of an earlier run with the same seed would be found in the cache.
    server.flush_cache(chosen.url)
    for load in (Load.of(each, corpus, chosen.seed) for w in workloads for each in w.variations()):
        warm_prefixes(chosen.url, load)
        for concurrency in load.workload.concurrency:
            warm_up(chosen.url, load, concurrency)
            for repeat in range(chosen.repeats):
                title = f"{chosen.name} {load.workload.name} at {concurrency}"
                record, driven = measure(chosen.url, load, concurrency, repeat=repeat, title=title)
                record |= server.capacity(chosen.url)
                point = key(
                    variant.name, load.workload, concurrency, repeat=repeat, round=0, seed=chosen.seed
                )
                store.append(point, variant, record, driven.exchanges)
                print(line(title, record), flush=True)
    return True
