"""Load SGLang servers as agents do, compare them, say where a step's time goes; see docs/benchmarks.md."""

from __future__ import annotations

import argparse
import http.client
import shlex
import signal
import sys
import time
from pathlib import Path

from bench_serving import options, workload

INTERRUPTED = 130
"""Exit status, as a shell gives it."""

MORE = """\
Programs of their own, each with --help: python -m bench_serving.plan (what fits a node, on paper),
.one_rank (one rank's share of M3 as a model folder), .operators (operators beside SGLang's),
.tune_experts, .client_cost."""
SERVED = "Flags after -- go to every server: ... -- --model-path MODEL --tp-size 8"


def main(arguments: list[str] | None = None) -> int:
    """Run one of the commands; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    arguments, flags = _split(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m bench_serving",
        description=__doc__,
        epilog=MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (RuntimeError, OSError, http.client.HTTPException) as error:
        where = f"{chosen.url}: " if getattr(chosen, "url", None) else ""
        print(f"error: {where}{getattr(error, 'reason', None) or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The tool's arguments, and the servers' flags after `--`."""
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def _command(commands, name: str, what: str, epilog: str | None = None) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=what, description=what, epilog=epilog, formatter_class=options.Help)


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="of the report and what it is made from"
    )


def _add_workloads(commands) -> None:
    parser = _command(commands, "workloads", "list the workloads")
    parser.set_defaults(run=_run_workloads)


def _run_workloads(chosen: argparse.Namespace) -> int:
    for name in workload.names():
        load = workload.load(name)
        print(f"{name:14} {load.description} At {', '.join(map(str, load.concurrency))}.")
    return 0


def _add_run(commands) -> None:
    parser = _command(commands, "run", "load a running server; its cache is emptied first")
    options.add_load(parser)
    options.add_url(parser)
    parser.add_argument("--name", default="server", help="what the report calls it")
    parser.add_argument(
        "--machine", default="", help="what it runs on, for a server elsewhere; default: found out if here"
    )
    parser.add_argument(
        "--repeats", type=options.count, default=1, metavar="N", help="measurements of each point"
    )
    _add_out(parser)
    parser.set_defaults(run=_run_run)


def _run_run(chosen: argparse.Namespace) -> int:
    from bench_serving import running

    loads = options.load_workloads(chosen)
    failed = running.run(chosen, loads, options.corpus_loader(chosen, options.longest_prompt(loads)))
    _report(chosen.out, chosen.command_line)
    return _failures({chosen.name: failed})


def _failures(failed: dict[str, int]) -> int:
    """The exit status that failed requests make, said why."""
    for name, requests in failed.items():
        if requests:
            print(f"error: {name}: {requests} requests failed; the report says why", file=sys.stderr)
    return 1 if any(failed.values()) else 0


def _add_compare(commands) -> None:
    parser = _command(
        commands,
        "compare",
        "start variants of a server and load each; measured points are resumed within the hour",
        SERVED,
    )
    options.add_load(parser)
    options.add_variants(parser)
    parser.add_argument(
        "--repeats",
        type=options.count,
        default=1,
        metavar="N",
        help="measurements of each point on one server",
    )
    parser.add_argument(
        "--rounds",
        type=options.count,
        default=2,
        metavar="N",
        help="starts of each variant, every other time in reverse order, so that drift meets all alike",
    )
    parser.add_argument("--together", action="store_true", help="all variants up at once, alternating points")
    parser.add_argument(
        "--stop-after-s",
        type=options.above_zero,
        default=float("inf"),
        metavar="SECONDS",
        help="start no point later than this",
    )
    options.add_start_limit(parser)
    parser.add_argument(
        "--probe",
        action=argparse.BooleanOptionalAction,
        help="after all is measured, start each variant of the plugin once more and note which blocks and "
        "experts the work touches; default: where weights are dummies",
    )
    _add_out(parser)
    parser.set_defaults(run=_run_compare)


def _run_compare(chosen: argparse.Namespace) -> int:
    from bench_serving import compare
    from bench_serving.server import has_dummy_weights
    from bench_serving.store import Store

    variants = options.read_variants(chosen)
    comparison = compare.Comparison(
        variants,
        options.load_workloads(chosen),
        chosen.repeats,
        chosen.rounds,
        chosen.seed,
        chosen.together,
        chosen.stop_after_s,
        chosen.start_limit_s,
    )
    corpus_of = options.corpus_loader(chosen, options.longest_prompt(comparison.workloads))
    corpus = corpus_of(variants[0].flag("--model-path"))
    begin = time.monotonic()
    try:
        result = compare.run(comparison, corpus, Store(chosen.out))
    except KeyboardInterrupt:
        print("\ninterrupted; the same command, within the hour, measures what is missing", flush=True)
        result = None
    if Store(chosen.out).points():
        _report(chosen.out, chosen.command_line)
    if result is None:
        return INTERRUPTED
    if any(map(has_dummy_weights, variants)) if chosen.probe is None else chosen.probe:
        result.broken.update(compare.note_work(comparison, corpus, Store(chosen.out), begin))
        _report(chosen.out, chosen.command_line)
    if result.missing:
        print(f"not measured: {', '.join(result.missing)}; the same command, within the hour, does it")
    for name, reason in result.broken.items():
        print(f"error: {name}: {reason}", file=sys.stderr, flush=True)
    return _failures(result.failed) or (1 if result.broken else 0)


def _add_report(commands) -> None:
    parser = _command(
        commands, "report", "write the Markdown and the plots of measured points, or of a profile, again"
    )
    _add_out(parser)
    parser.set_defaults(run=_run_report)


def _run_report(chosen: argparse.Namespace) -> int:
    from bench_serving import profile_report
    from bench_serving.store import POINTS

    if (chosen.out / POINTS).is_file():
        return _report(chosen.out, None)
    if (chosen.out / profile_report.FILE).is_file():
        profile_report.write(chosen.out)
        print(chosen.out / profile_report.REPORT)
        return 0
    raise FileNotFoundError(f"{chosen.out} holds neither {POINTS} nor {profile_report.FILE}; measure first")


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
    parser = _command(
        commands, "knee", "find the highest concurrency at which a running server meets a target"
    )
    options.add_load(parser, many=False)
    options.add_url(parser)
    parser.add_argument(
        "--tokens-per-s",
        type=options.above_zero,
        default=50.0,
        metavar="TOKENS",
        help="per request, after the first token, at least",
    )
    parser.add_argument(
        "--first-token-s",
        type=options.above_zero,
        default=1.0,
        metavar="SECONDS",
        help="to the first token at most",
    )
    parser.add_argument(
        "--quantile", choices=("median", "p95"), default="median", help="requests that must meet it"
    )
    parser.add_argument(
        "--most", type=options.count, default=256, metavar="N", help="highest concurrency to try"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines of every concurrency tried")
    parser.set_defaults(run=_run_knee)


def _run_knee(chosen: argparse.Namespace) -> int:
    from bench_serving import knee

    (load,) = options.load_workloads(chosen)
    return knee.main(chosen, load, options.corpus_loader(chosen, options.longest_prompt((load,))))


def _add_profile(commands) -> None:
    parser = _command(
        commands,
        "profile",
        "split a decode and an extend step of each variant into what takes the time",
        SERVED,
    )
    options.add_variants(parser)
    parser.add_argument(
        "--url",
        type=options.url,
        help="profile this server, on this machine, instead of starting variants",
    )
    for name, default, what in (
        ("--prefix-tokens", 60_000, "that all requests share and find in the cache"),
        ("--new-tokens", 512, "per request of the extend steps"),
        ("--concurrency", 8, "requests of a decode step; extend steps have one"),
        ("--steps", 5, "of each stage, to take the median of"),
    ):
        parser.add_argument(name, type=options.count, default=default, metavar="N", help=what)
    parser.add_argument(
        "--limit-s",
        type=options.above_zero,
        default=900.0,
        metavar="SECONDS",
        help="for the profile of one server that is up, a minute or two at M3's size",
    )
    options.add_prompts(parser)
    options.add_start_limit(parser)
    _add_out(parser)
    parser.set_defaults(run=_run_profile)


def _run_profile(chosen: argparse.Namespace) -> int:
    from bench_serving import profile

    if chosen.url and (chosen.variant or chosen.flags):
        raise ValueError("--url profiles a server that runs already: no --variant, no flags after --")
    if chosen.url:
        subjects = profile.running(chosen.url)
    else:
        subjects = profile.started(options.read_variants(chosen), chosen.out, chosen.start_limit_s)
    return profile.main(chosen, subjects, options.corpus_loader(chosen, chosen.prefix_tokens))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    # Whoever ends this process means its servers, too: they are stopped on the way out.
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
