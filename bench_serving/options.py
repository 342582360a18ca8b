"""Arguments that the commands of `python -m bench_serving` have in common, and what is made of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace

from bench_serving import corpus, workload
from bench_serving.corpus import Corpus
from bench_serving.machine import gpus
from bench_serving.server import PLUGINS, START_LIMIT_SECONDS, Variant, parse_variant
from bench_serving.workload import Workload

CHARACTERS_PER_PROMPT_TOKEN = 16
LEAST_CHARACTERS, MOST_CHARACTERS = 400_000, 8_000_000
"""Real text is tokenised for four prompts of the longest kind, in these bounds; longer ones repeat it."""
DEFAULT_VARIANTS = ("stock SGLANG_PLUGINS=none", "sglang-m3")
VARIANTS_WITHOUT_GPU = ("cached", "uncached --disable-radix-cache")


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def add_load(parser: argparse.ArgumentParser, *, many: bool = True) -> None:
    parser.add_argument(
        "--workload",
        required=True,
        metavar="NAME[,NAME]" if many else "NAME",
        help=f"one of {', '.join(workload.names())}, or a .toml file",
    )
    if many:
        parser.add_argument(
            "--concurrency", type=numbers, default=(), metavar="N[,N]", help="default: the workload's"
        )
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all lengths, for small models")
    parser.add_argument("--requests-per-slot", type=int, help="sessions of a point per session in flight")
    parser.add_argument("--least-sessions", type=int, help="sessions of a point at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--prompts",
        choices=("text", "random"),
        default="text",
        help="tokens of the Python standard library's source, or random ids",
    )
    parser.add_argument("--tokenizer", help="model folder with the tokenizer; default: the server's model")
    parser.add_argument("--vocab", type=int, help="random ids lie below this; default: the model's config")


def load_workloads(chosen: argparse.Namespace) -> tuple[Workload, ...]:
    """The workloads that were asked for, with what the command changes in them."""
    changed = {
        "concurrency": getattr(chosen, "concurrency", ()),
        "requests_per_slot": chosen.requests_per_slot,
        "least_sessions": chosen.least_sessions,
    }
    changed = {name: value for name, value in changed.items() if value}
    return tuple(
        replace(workload.load(name).scaled(chosen.scale), **changed) for name in chosen.workload.split(",")
    )


def corpus_loader(chosen: argparse.Namespace, longest_tokens: int) -> Callable[[str], Corpus]:
    """What makes the corpus for prompts of up to so many tokens, from the server's model folder."""

    def load(model_path: str) -> Corpus:
        path = chosen.tokenizer or model_path
        if chosen.prompts == "random":
            return corpus.RandomCorpus(chosen.vocab or corpus.vocabulary(path))
        characters = CHARACTERS_PER_PROMPT_TOKEN * longest_tokens
        return corpus.text_corpus(path, characters=min(max(characters, LEAST_CHARACTERS), MOST_CHARACTERS))

    return load


def longest_prompt(loads: Iterable[Workload]) -> int:
    """Tokens of the longest prefix and first turn."""
    return max(
        max(each.prefix_tokens for each in load.variations())
        + max(kind.first_input_tokens[1] + kind.input_tokens[1] for kind in load.traffic)
        for load in loads
    )


def read_variants(chosen: argparse.Namespace) -> tuple[Variant, ...]:
    """The variants that were asked for.

    Raises:
        ValueError: one that cannot serve, or two of one name.
    """
    default = DEFAULT_VARIANTS if gpus() else VARIANTS_WITHOUT_GPU
    variants = tuple(parse_variant(text, chosen.flags) for text in chosen.variant or default)
    if len({variant.name for variant in variants}) < len(variants):
        raise ValueError("variants need different names")
    stock = [variant.name for variant in variants if (PLUGINS, "none") in variant.environment]
    if stock and not gpus():
        raise ValueError(
            f"variant {', '.join(stock)}: stock SGLang cannot serve M3 without a GPU; compare features of "
            f"the plugin instead, such as {' and '.join(map(repr, VARIANTS_WITHOUT_GPU))}"
        )
    missing = [variant.name for variant in variants if not variant.flag("--model-path")]
    if missing:
        raise ValueError(
            f"variant {', '.join(missing)} has no --model-path; give the server's flags after --"
        )
    return variants


def add_variants(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--variant",
        action="append",
        metavar="'NAME [VAR=value ...] [--flag ...]'",
        help=f"a server to start, repeatable; default: {' and '.join(map(repr, DEFAULT_VARIANTS))}, "
        f"without a GPU {' and '.join(map(repr, VARIANTS_WITHOUT_GPU))}. Flags after -- go to all",
    )


def add_start_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--start-limit-s",
        type=float,
        default=START_LIMIT_SECONDS,
        help="a server that is not healthy by then broke; default: an hour, for checkpoints on slow disks",
    )
