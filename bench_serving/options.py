"""Arguments that the commands of `python -m bench_serving` have in common, and what is made of them."""

from __future__ import annotations

import argparse
import urllib.parse
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
OWN_FLAGS = ("--host", "--port")


class Help(argparse.HelpFormatter):
    """Says every default that is a value, where the help does not say it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = action.help is None or "default" in action.help
        unsaid = action.default is False or action.default in (None, argparse.SUPPRESS, float("inf"), ())
        return action.help if said or unsaid else f"{action.help}; default: {action.default}"


class LaidOutHelp(Help, argparse.RawDescriptionHelpFormatter):
    """The same, for a description that has its lines already."""


def numbers(text: str) -> tuple[int, ...]:
    """Of a command's argument such as `1,8,32`."""
    try:
        found = tuple(int(number) for number in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of positive numbers such as 1,8,32")
    return found


def count(text: str) -> int:
    """A whole number of at least 1, of a command's argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def above_zero(text: str) -> float:
    """A number above 0, of a command's argument."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def url(text: str) -> str:
    """A server's address without a slash at its end, of a command's argument."""
    parsed = urllib.parse.urlsplit(text)
    if parsed.scheme not in ("http", "https") or not parsed.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is no address such as http://127.0.0.1:30000")
    return text.rstrip("/")


def add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", type=url, required=True, help="the server, such as http://127.0.0.1:30000")


def add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    parser.add_argument(
        "--prompts",
        choices=("text", "random"),
        default="text",
        help="tokens of the Python standard library's source, or random ids",
    )
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help="where the tokenizer is; default: the server's model"
    )
    parser.add_argument(
        "--vocab", type=count, metavar="IDS", help="random ids lie below this; default: the model's config"
    )


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
    parser.add_argument(
        "--scale", type=above_zero, default=1.0, metavar="FACTOR", help="on all lengths, for small models"
    )
    parser.add_argument(
        "--requests-per-slot",
        type=count,
        metavar="N",
        help="sessions of a point per session in flight; default: the workload's",
    )
    parser.add_argument(
        "--least-sessions", type=count, metavar="N", help="sessions of a point; default: the workload's"
    )
    add_prompts(parser)


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
    for variant in variants:
        given = [flag for flag in OWN_FLAGS if variant.has(flag)]
        if given:
            raise ValueError(f"variant {variant.name}: {', '.join(given)} is chosen by this tool")
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
        type=above_zero,
        default=START_LIMIT_SECONDS,
        metavar="SECONDS",
        help="a server that is not healthy by then broke; default: an hour, for checkpoints on slow disks",
    )
