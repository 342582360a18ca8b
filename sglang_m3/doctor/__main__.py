"""`python -m sglang_m3.doctor [SGLang's server flags] [--as MACHINE] [--json]`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

EPILOG = """\
Without --model-path the published BF16 checkpoint is meant. The published names need no network.
Exit status: 0 when nothing is known that stops a server, 1 otherwise.
"""


SHOWN = (
    "attention_backend",
    "chunked_prefill_size",
    "context_length",
    "dtype",
    "kv_cache_dtype",
    "max_running_requests",
    "mem_fraction_static",
    "moe_runner_backend",
    "page_size",
    "quantization",
    "sampling_backend",
)
"""Server arguments that people want to see even where they were not given; `--json` has all that changed."""


def main(argv: Sequence[str]) -> int:
    """Run the doctor; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_m3.doctor",
        usage="%(prog)s [SGLang's server flags] [--as MACHINE] [--json] [--check-weights FOLDER]",
        description="What will run, what will not, and why. Loads no weights.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--as", dest="machine", metavar="MACHINE", help="h200x8, h100x8, b200x8, ..., or cpu; this machine"
    )
    parser.add_argument("--json", action="store_true", help="for programs; sizes in bytes")
    parser.add_argument(
        "--check-weights", type=Path, metavar="FOLDER", help="read all weights and name NaN and infinite ones"
    )
    own, flags = parser.parse_known_args(argv)
    if own.check_weights is not None:
        return _check_weights(own.check_weights, own.json)

    # SGLang takes seconds to import; --help and a wrong machine's name need not wait for it.
    from sglang_m3.doctor.machine import named, this_machine

    try:
        machine = this_machine() if own.machine is None else named(own.machine)
    except ValueError as error:
        parser.error(str(error))
    from sglang_m3.doctor.diagnosis import diagnose
    from sglang_m3.doctor.resolve import resolve

    if not any(flag.split("=")[0] in ("--model-path", "--model", "--config") for flag in flags):
        flags = [*flags, "--model-path", "MiniMaxAI/MiniMax-M3"]
    diagnosis = diagnose(resolve(flags, machine), machine)
    print(json.dumps(diagnosis.as_json(), indent=2) if own.json else _text(diagnosis))
    return 0 if diagnosis.starts else 1


def _text(diagnosis: Any) -> str:
    lines = [f"{diagnosis.model} on {diagnosis.machine}", ""]
    for name, value in diagnosis.flags.items():
        if value["given"] is not None or name in SHOWN:
            given = "" if value["given"] is None else f"  (given: {value['given']})"
            lines.append(f"  --{name.replace('_', '-'):<32} {value['resolved']}{given}")
    graphs = diagnosis.flags.get("cuda_graph_config")
    if graphs is not None:
        decode, prefill = (graphs["resolved"][phase] for phase in ("decode", "prefill"))
        lines.append(
            f"  CUDA graphs: decode {decode['backend']}, up to {decode['max_bs']} requests; "
            f"prefill {prefill['backend']}"
        )
    if diagnosis.operators:
        lines += ["", *(f"  {part:<34} {what}" for part, what in diagnosis.operators.items())]
    memory = diagnosis.memory
    if memory is not None:
        lines += ["", "  memory of one rank, GiB"]
        lines += [f"    {name:<16} {size / 2**30:9.2f}" for name, size in asdict(memory.weights).items()]
        lines += [
            f"    {'weights':<16} {memory.weights.total / 2**30:9.2f}",
            f"    {'rotary table':<16} {memory.rotary_table / 2**30:9.2f}",
            f"    {'vision cache':<16} {memory.vision_cache / 2**30:9.2f}",
            f"    {'workspaces':<16} {memory.workspaces / 2**30:9.2f}",
            f"    {'cache':<16} {memory.cache / 2**30:9.2f}   {memory.tokens:,} tokens of "
            f"{memory.kv_per_token:,} bytes of K and V and {memory.index_per_token:,} of index keys",
        ]
    lines += ["", *(f"note: {note}" for note in diagnosis.notes)]
    lines += [f"problem: {problem}" for problem in diagnosis.problems]
    lines.append("would start" if diagnosis.starts else "would not start")
    return "\n".join(lines)


def _check_weights(folder: Path, as_json: bool) -> int:
    from sglang_m3.checkpoint import CheckpointError, bad_tensors

    try:
        found = [asdict(tensor) for tensor in bad_tensors(folder)]
    except CheckpointError as error:
        print(json.dumps({"error": str(error)}) if as_json else f"problem: {error}")
        return 1
    if as_json:
        print(json.dumps({"bad_tensors": found}, indent=2))
    else:
        for tensor in found:
            print(
                f"{tensor['file']}: {tensor['name']} has {tensor['nans']} NaN and {tensor['infinities']} "
                f"infinite values, the first at element {tensor['first']}"
            )
        print(f"{len(found)} tensors with NaN or infinite values" if found else "every weight is a number")
    return 1 if found else 0


if __name__ == "__main__":
    # What SGLang says while it is imported and resolves is not the doctor's answer.
    warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    sys.exit(main(sys.argv[1:]))
