"""On a Hopper GPU: the model served by the plugin and by stock SGLang, against transformers.

    python -m tests.serving.gpu_engine [--out FILE] [--modes graph eager ...] [--together 4]

Builds a seeded checkpoint with M3's head sizes, serves it in bfloat16 in several modes (`MODES`), some at a
time, and compares each with transformers' own model in float32: the errors of log-probabilities, how far
each chosen token is from the best one, and the overlap of recorded selections. `shadow` checks the operators
against float64 on what the engine gives them. Every mode counts the kernels first met while it served.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.serving.gpu_compare import compare, what_is_wrong
from tests.serving.gpu_modes import (
    COMPARED,
    FLAGS,
    MODES,
    NEW_TOKENS,
    PREFIX_TOKENS,
    TAIL_TOKENS,
    Mode,
    prompts,
)


def serve(mode: str) -> dict[str, Any]:
    """Generate with one engine; runs in a process of its own."""
    import sglang

    if MODES[mode].flags.get("dtype") == "float32":
        from sglang_m3 import overrides

        overrides.NOT_ON_HOPPER_YET["dtype"] += ("float32",)
    begin = time.monotonic()
    engine = sglang.Engine(model_path=os.environ["M3_CHECKPOINT"], **FLAGS | MODES[mode].flags)
    ready = time.monotonic()
    asked = prompts()
    engine.generate(input_ids=asked[0], sampling_params={"max_new_tokens": 1})
    request = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    answers, seconds, rounds = [], [], []
    for _ in range(2):
        began = time.monotonic()
        groups = [[ids] for ids in asked] if MODES[mode].alone else [asked]
        answers = [
            answer
            for group in groups
            for answer in engine.generate(input_ids=group, sampling_params=request, return_logprob=True)
        ]
        seconds.append(round(time.monotonic() - began, 3))
        rounds.append([answer["output_ids"] for answer in answers])
    accepted = [answer["meta_info"].get("spec_accept_length") for answer in answers]
    result = {
        "start_seconds": round(ready - begin, 1),
        "batch_seconds": seconds,
        "cached_tokens": sorted({answer["meta_info"]["cached_tokens"] for answer in answers}),
        "tokens": rounds[-1],
        "tokens_of_first_round": rounds[0],
        "logprobs": [[v for v, _, _ in a["meta_info"]["output_token_logprobs"]] for a in answers],
        "request_ids": [answer["meta_info"]["id"] for answer in answers],
        "tokens_per_verify": accepted if None not in accepted else None,
    }
    engine.shutdown()
    findings = [json.loads(line) for line in Path(os.environ["SHADOW_FILE"]).read_text().splitlines()]
    met = [f["kernel"] for f in findings if f["op"] == "compile" and f["at"] > ready]
    result["kernels_first_met_while_serving"] = sorted(set(met))
    chosen = [f for f in findings if f["op"] == "choose"]
    attended = [f for f in findings if f["op"] == "attend"]
    if chosen:
        result["shadow"] = {
            "calls": len(chosen),
            "rows_and_heads_checked": sum(f["rows_checked"] for f in chosen),
            "other_set_than_float64": sum(f["other_set"] for f in chosen),
            "worst_relative_score": max(f["worst_relative"] for f in chosen),
            "attention_error_max": max(f["worst"] for f in attended),
            "attention_largest": max(f["largest"] for f in attended),
        }
    return result


def child(mode: str, out: Path, scratch: Path, checkpoint: Path) -> dict[str, Any] | None:
    """Run one mode, or the comparison, in a process; prints what it found, or how it failed."""
    chosen = MODES.get(mode, Mode())
    findings = scratch / f"{mode}.jsonl"
    findings.touch()
    environ = {
        **os.environ,
        "M3_CHECKPOINT": str(checkpoint),
        "M3_RECORDS": str(scratch),
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "tests.serving.shadow",
        "SHADOW_FILE": str(findings),
        "SHADOW_CACHE": str(scratch / f"{mode}.cache"),
        "SHADOW_CACHE_TOKENS": str(PREFIX_TOKENS + TAIL_TOKENS),
        **chosen.environ,
    }
    if chosen.records:
        (scratch / mode).mkdir()
        environ["SGLANG_M3_RECORD_BLOCKS"] = str(scratch / mode)
    command = [sys.executable, "-m", "tests.serving.gpu_engine", "--mode", mode, "--out", str(out)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    log = done.stdout + done.stderr
    (out.parent / f"{mode}.log").write_text(log)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        print(f"== {mode} failed ({done.returncode})\n{log[-2500:]}", flush=True)
        return None
    result = json.loads(lines[-1].removeprefix("RESULT "))
    hidden = ("tokens", "tokens_of_first_round", "logprobs", "request_ids")
    shown = {key: value for key, value in result.items() if key not in hidden}
    print(f"== {mode}: {json.dumps(shown)}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=(*MODES, "compare"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("gpu_engine.json"))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--together", type=int, default=1, help="modes that run at the same time")
    arguments = parser.parse_args()
    if arguments.mode is not None:
        if arguments.mode == "compare":
            result = compare(json.loads(arguments.out.read_text()), Path(os.environ["M3_RECORDS"]))
        else:
            result = serve(arguments.mode)
        print("\nRESULT " + json.dumps(result))
        return
    for mode in arguments.modes:
        if COMPARED.get(mode, mode) not in arguments.modes:
            parser.error(f"mode {mode} is compared with {COMPARED[mode]}, which is not among --modes")
    from sglang_m3.tiny import TinyConfig, build

    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp())
    checkpoint = build(
        scratch / "m3", TinyConfig(hidden=512, heads=64, kv_heads=4, head_dim=128, topk_blocks=16)
    )
    with ThreadPoolExecutor(arguments.together) as pool:
        answers = pool.map(lambda mode: child(mode, arguments.out, scratch, checkpoint), arguments.modes)
        results = dict(zip(arguments.modes, answers))
    served = {mode: result for mode, result in results.items() if result is not None}
    arguments.out.write_text(json.dumps(served))
    compared = child("compare", arguments.out, scratch, checkpoint)
    arguments.out.write_text(json.dumps({"served": served, "compared": compared}))
    failed = [mode for mode, result in results.items() if result is None]
    if failed or compared is None:
        sys.exit(f"failed: {', '.join(failed) or 'compare'}")
    wrong = [f"{mode}: {reason}" for mode in compared if (reason := what_is_wrong(mode, compared[mode]))]
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
