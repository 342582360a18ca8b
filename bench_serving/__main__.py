"""`python -m bench_serving`: load a server, compare servers, report; see `docs/benchmarks.md`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from bench_serving import workload
from bench_serving.workload import Workload, WorkloadError

CHARACTERS_PER_PROMPT_TOKEN = 16
LEAST_CHARACTERS, MOST_CHARACTERS = 400_000, 8_000_000
"""Real text is tokenised for four prompts of the longest kind, in these bounds; longer ones repeat it."""
DEFAULT_VARIANTS = ("stock SGLANG_PLUGINS=none", "sglang-m3")
VARIANTS_WITHOUT_GPU = ("cached", "uncached --disable-radix-cache")


def main(arguments: list[str] | None = None) -> int:
    """Run one of the commands; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    arguments, flags = _split(arguments)
    parser = argparse.ArgumentParser(prog="python -m bench_serving", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_workloads(commands)
    _add_run(commands)
    _add_compare(commands)
    _add_report(commands)
    _add_knee(commands)
    _add_profile(commands)
    chosen = parser.parse_args(arguments)
    if flags and not hasattr(chosen, "variant"):
        parser.error(f"{chosen.command} starts no server, so it takes no flags after --")
    chosen.flags = tuple(flags)
    chosen.command_line = "python -m bench_serving " + shlex.join(
        [*arguments, *(["--", *flags] if flags else [])]
    )
    try:
        return chosen.run(chosen)
    except (WorkloadError, ValueError, FileNotFoundError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The tool's arguments, and the servers' flags after `--`."""
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _add_load(parser: argparse.ArgumentParser, *, many: bool = True) -> None:
    parser.add_argument(
        "--workload",
        required=True,
        metavar="NAME[,NAME]" if many else "NAME",
        help=f"one of {', '.join(workload.names())}, or a .toml file",
    )
    parser.add_argument(
        "--concurrency", type=_numbers, default=(), metavar="N[,N]", help="default: the workload's"
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


def _workloads(chosen: argparse.Namespace) -> tuple[Workload, ...]:
    from bench_serving.compare import at

    return tuple(
        at(
            workload.load(name).scaled(chosen.scale),
            chosen.concurrency,
            chosen.requests_per_slot,
            chosen.least_sessions,
        )
        for name in chosen.workload.split(",")
    )


def _corpus(chosen: argparse.Namespace, model_path: str, longest_tokens: int):
    """The corpus to cut prompts of up to so many tokens from."""
    from bench_serving import corpus

    path = chosen.tokenizer or model_path
    if chosen.prompts == "random":
        return corpus.RandomCorpus(chosen.vocab or corpus.vocabulary(path))
    characters = CHARACTERS_PER_PROMPT_TOKEN * longest_tokens
    return corpus.text_corpus(path, characters=min(max(characters, LEAST_CHARACTERS), MOST_CHARACTERS))


def _longest(loads: tuple[Workload, ...]) -> int:
    """Tokens of the longest prefix and first turn."""
    return max(
        max(each.prefix_tokens for each in load.variations())
        + max(kind.first_input_tokens[1] + kind.input_tokens[1] for kind in load.traffic)
        for load in loads
    )


def _variants(chosen: argparse.Namespace):
    from bench_serving.server import gpu_bytes_used, parse_variant

    default = DEFAULT_VARIANTS if gpu_bytes_used() is not None else VARIANTS_WITHOUT_GPU
    variants = tuple(parse_variant(text, chosen.flags) for text in chosen.variant or default)
    if len({variant.name for variant in variants}) < len(variants):
        raise ValueError("variants need different names")
    stock = [variant.name for variant in variants if ("SGLANG_PLUGINS", "none") in variant.environment]
    if stock and gpu_bytes_used() is None:
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


def _add_variants(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--variant",
        action="append",
        metavar="'NAME [VAR=value ...] [--flag ...]'",
        help=f"a server to start, repeatable; default: {' and '.join(map(repr, DEFAULT_VARIANTS))}, "
        f"without a GPU {' and '.join(map(repr, VARIANTS_WITHOUT_GPU))}. Flags after -- go to all",
    )


def _add_workloads(commands) -> None:
    parser = commands.add_parser("workloads", help="list the workloads")
    parser.set_defaults(run=_run_workloads)


def _run_workloads(chosen: argparse.Namespace) -> int:
    for name in workload.names():
        load = workload.load(name)
        print(f"{name:14} {load.description} At {', '.join(map(str, load.concurrency))}.")
    return 0


def _add_run(commands) -> None:
    parser = commands.add_parser("run", help="load a running server")
    _add_load(parser)
    parser.add_argument("--url", required=True)
    parser.add_argument("--name", default="server", help="what the report calls it")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.set_defaults(run=_run_run)


def _run_run(chosen: argparse.Namespace) -> int:
    from bench_serving import running

    loads = _workloads(chosen)
    complete = running.run(chosen, loads, lambda path: _corpus(chosen, path, _longest(loads)))
    return _report(chosen.out, chosen.command_line) if complete else 1


def _add_compare(commands) -> None:
    parser = commands.add_parser(
        "compare",
        help="start variants of a server and load each; measured points are resumed within the hour",
    )
    _add_load(parser)
    _add_variants(parser)
    parser.add_argument("--repeats", type=int, default=1, help="measurements of each point on one server")
    parser.add_argument("--rounds", type=int, default=1, help="starts of each variant, in alternating order")
    parser.add_argument("--together", action="store_true", help="all variants up at once, alternating points")
    parser.add_argument(
        "--stop-after-s", type=float, default=float("inf"), help="start no point later than this"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.set_defaults(run=_run_compare)


def _run_compare(chosen: argparse.Namespace) -> int:
    from bench_serving import compare
    from bench_serving.store import Store

    variants = _variants(chosen)
    comparison = compare.Comparison(
        variants,
        _workloads(chosen),
        chosen.repeats,
        chosen.rounds,
        chosen.seed,
        chosen.together,
        chosen.stop_after_s,
    )
    corpus = _corpus(chosen, variants[0].flag("--model-path"), _longest(comparison.workloads))
    result = compare.run(comparison, corpus, Store(chosen.out))
    if not result.complete:
        print("not everything is measured; the same command measures what is missing", flush=True)
    for name, reason in result.broken.items():
        print(f"error: {name}: {reason}", file=sys.stderr, flush=True)
    if Store(chosen.out).points():
        _report(chosen.out, chosen.command_line)
    return 1 if result.broken else 0


def _add_report(commands) -> None:
    parser = commands.add_parser("report", help="write the Markdown and the plots of measured points again")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.set_defaults(run=_run_report)


def _run_report(chosen: argparse.Namespace) -> int:
    return _report(chosen.out, None)


def _report(folder: Path, command: str | None) -> int:
    """Write the report; without matplotlib no plots, said so. The command that measured is kept beside it."""
    import importlib.util

    from bench_serving import plots, report
    from bench_serving.store import Store

    kept = folder / "command.txt"
    if command is not None:
        kept.write_text(command + "\n", encoding="utf-8")
    store = Store(folder)
    drawn: list[str] = []
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: matplotlib is missing; `python -m bench_serving report` draws them elsewhere")
    else:
        drawn = plots.write(store)
    command = kept.read_text(encoding="utf-8").strip() if kept.exists() else ""
    print(report.write(store, title=folder.name, command=command, plots=drawn))
    return 0


def _add_knee(commands) -> None:
    parser = commands.add_parser(
        "knee", help="the highest concurrency of a running server that meets a target"
    )
    _add_load(parser, many=False)
    parser.add_argument("--url", required=True)
    parser.add_argument("--tokens-per-s", type=float, default=50.0, help="per request, after the first token")
    parser.add_argument("--first-token-s", type=float, default=1.0)
    parser.add_argument(
        "--quantile", choices=("median", "p95"), default="median", help="requests that must meet it"
    )
    parser.add_argument("--most", type=int, default=256, help="highest concurrency to try")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines of every concurrency tried")
    parser.set_defaults(run=_run_knee)


def _run_knee(chosen: argparse.Namespace) -> int:
    from bench_serving import knee

    (load,) = _workloads(chosen)
    return knee.main(chosen, load, lambda path: _corpus(chosen, path, _longest((load,))))


def _add_profile(commands) -> None:
    parser = commands.add_parser(
        "profile", help="split a decode and an extend step of each variant into what takes the time"
    )
    _add_variants(parser)
    parser.add_argument("--url", help="profile this server, on this machine, instead of starting variants")
    parser.add_argument("--prefix-tokens", type=int, default=60_000)
    parser.add_argument("--new-tokens", type=int, default=512, help="per request of the extend steps")
    parser.add_argument("--concurrency", type=int, default=8, help="requests of a decode step")
    parser.add_argument("--steps", type=int, default=5, help="steps of each stage to trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", choices=("text", "random"), default="text")
    parser.add_argument("--tokenizer")
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.set_defaults(run=_run_profile)


def _run_profile(chosen: argparse.Namespace) -> int:
    from bench_serving import profile

    if chosen.url and (chosen.variant or chosen.flags):
        raise ValueError("--url profiles a server that runs already: no --variant, no flags after --")
    subjects = profile.running(chosen.url) if chosen.url else profile.started(_variants(chosen), chosen.out)
    return profile.main(chosen, subjects, lambda path: _corpus(chosen, path, chosen.prefix_tokens))


if __name__ == "__main__":
    sys.exit(main())
