"""Loads a server that runs already."""

from __future__ import annotations

import argparse
import shlex
import urllib.parse
from collections.abc import Callable
from typing import Any

from bench_serving import server
from bench_serving.compare import line
from bench_serving.corpus import Corpus
from bench_serving.machine import is_here
from bench_serving.measure import Load, measure, warm_prefixes, warm_up
from bench_serving.server import Variant
from bench_serving.store import Host, Store, key
from bench_serving.workload import Workload


def run(
    chosen: argparse.Namespace, workloads: tuple[Workload, ...], corpus_of: Callable[[str], Corpus]
) -> int:
    """Measure every point of the workloads on the server at `chosen.url`; its cache is emptied first.
    Returns the number of failed requests.

    Raises:
        RuntimeError: a warm-up request failed.
    """
    arguments = server.info(chosen.url)
    variant = Variant(chosen.name, (), flags_of(arguments))
    corpus = corpus_of(arguments["model_path"])
    store = Store(chosen.out, host_of(chosen.url, chosen.machine, arguments))
    # Private text of an earlier run with the same seed would be found in the cache.
    server.flush_cache(chosen.url)
    failed = 0
    for load in (Load.of(each, corpus, chosen.seed) for w in workloads for each in w.variations()):
        warm_prefixes(chosen.url, load)
        for concurrency in load.workload.concurrency:
            for repeat in range(chosen.repeats):
                # Later repeats have lengths of their own.
                warm_up(chosen.url, load, concurrency, repeat=repeat, passes=1 if repeat else None)
                title = f"{chosen.name} {load.workload.name} at {concurrency}"
                record, driven = measure(chosen.url, load, concurrency, repeat=repeat, title=title)
                record |= server.capacity(chosen.url)
                point = key(
                    variant.name, load.workload, concurrency, repeat=repeat, round=0, seed=chosen.seed
                )
                store.append(point, variant, record, driven.exchanges)
                failed += record["failed"]
                print(line(title, record), flush=True)
    return failed


def flags_of(arguments: dict[str, Any]) -> tuple[str, ...]:
    """The flags that a server was started with, as its `/server_info` says; at least its model."""
    words = shlex.split(arguments.get("launch_command") or "")
    flags = [place for place, word in enumerate(words) if word.startswith("--")]
    return tuple(words[flags[0] :]) if flags else ("--model-path", arguments["model_path"])


def host_of(url: str, named: str, arguments: dict[str, Any]) -> Host:
    """What the server at `url` runs on: `named` if that is given, this machine if it is here."""
    if is_here(url):
        here = Host.here()
        return Host(named or here.machine, here.code)
    host = urllib.parse.urlsplit(url).hostname
    hardware = named or f"unknown, at {host} (--machine says what it is)"
    return Host(f"{hardware}; SGLang {arguments.get('version')}", "unknown, on another machine")
