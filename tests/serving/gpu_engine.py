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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Without a GPU `--modes eager shadow` still run, to try the script itself."""

PREFIX_TOKENS, TAIL_TOKENS, NEW_TOKENS, BRANCHES = (5000, 60, 64, 8) if DEVICE == "cuda" else (600, 9, 3, 2)

LARGEST_MEAN_ERROR, LARGEST_MEDIAN_ERROR = 0.06, 0.025
"""The tolerance of bfloat16, in nats: what a mode's log-probabilities may be from float32's over all tokens.

Stock SGLang's own modes lie at 0.030 to 0.045 and 0.014 to 0.016; a wrong block moves single tokens by 1.
"""

FLAGS = {
    "dtype": "bfloat16",
    "chunked_prefill_size": 2048,
    "max_total_tokens": 65536,
    "max_running_requests": 16,
    "context_length": 16384,
    "log_level": "info",
    "skip_tokenizer_init": True,
    "random_seed": 1,
    "page_size": 128,
    "enable_fp32_lm_head": True,
} | (
    {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "cuda_graph_max_bs_decode": 8,
        "mem_fraction_static": 0.9,
    }
    if DEVICE == "cuda"
    else {}
)
NGRAM = {
    "speculative_algorithm": "NGRAM",
    "speculative_ngram_max_bfs_breadth": 1,
    "speculative_num_draft_tokens": 6,
}
EAGER = {"disable_cuda_graph": True}
FLOAT32 = {
    "SHADOW_CHECK": "float32",
    "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
    "SGLANG_OPT_USE_BF16_ROUTER_GEMM": "0",
}
"""SGLang's and the plugin's CUDA kernels are for half precision; their plain forms take their places."""
STOCK = {"SGLANG_PLUGINS": "none"}
DECODE_GRAPHS = {"cuda_graph_backend_prefill": "disabled"}
SMALL_CHUNKS = {"chunked_prefill_size": 1024}


@dataclass(frozen=True)
class Mode:
    """One way to serve.

    Attributes:
        flags: of `sglang.Engine`, besides the common ones.
        environ: environment variables.
        records: whether the chosen blocks are recorded.
        alone: whether requests are sent one after the other, not together.
    """

    flags: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    records: bool = False
    alone: bool = False


MODES = {
    "graph": Mode(),
    "eager": Mode(EAGER, records=True),
    "graph-small-chunks": Mode(SMALL_CHUNKS),
    "decode-graph": Mode(DECODE_GRAPHS),
    "decode-graph-small-chunks": Mode(DECODE_GRAPHS | SMALL_CHUNKS),
    "stock": Mode(environ=STOCK),
    "stock-small-chunks": Mode(SMALL_CHUNKS, STOCK),
    "stock-decode-graph": Mode(DECODE_GRAPHS, STOCK),
    "stock-eager": Mode(EAGER, STOCK),
    "stock-fa3": Mode({"attention_backend": "fa3"}, STOCK),
    "shadow": Mode(EAGER, {"SHADOW_CHECK": "1"}),
    "reference": Mode(EAGER, {"SHADOW_CHECK": "reference"}, records=True),
    "graph-alone": Mode(alone=True),
    "float32": Mode(EAGER | {"dtype": "float32"}, FLOAT32),
    "ngram-float32": Mode(NGRAM | EAGER | {"dtype": "float32"}, FLOAT32),
    "ngram": Mode(NGRAM),
    "ngram-eager": Mode(NGRAM | EAGER, {"SHADOW_CHECK": "1"}),
    "flashinfer": Mode({"attention_backend": "flashinfer"}),
    "fa3": Mode({"attention_backend": "fa3"}),
    "index-fp8": Mode(EAGER, {"SGLANG_M3_INDEX_DTYPE": "fp8_e4m3"}, records=True),
    "kv-fp8": Mode(EAGER | {"kv_cache_dtype": "fp8_e4m3"}, records=True),
    "kv-fp8-stock": Mode({"kv_cache_dtype": "fp8_e4m3"}, STOCK),
}

PLAIN = {"ngram": "graph", "ngram-eager": "shadow", "graph-alone": "graph", "ngram-float32": "float32"}
"""A mode -> the mode that decodes plainly and together, whose tokens its own are compared with.

In bfloat16 a token's sums are rounded otherwise with other numbers of rows, so answers part where two tokens
are about equally likely, those of `graph-alone` as well. In float32 nothing parts them.
"""

LARGEST_MEAN_ERROR_FLOAT32 = 1e-5
"""The tolerance of a model in float32. There a mode in `PLAIN` must generate the same tokens, too."""


def prompts() -> list[list[int]]:
    """One prefix, eight tails: token ids of the standard library's source."""
    import inspect
    import random

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(os.environ["M3_CHECKPOINT"])
    ids = tokenizer(inspect.getsource(inspect) + inspect.getsource(random))["input_ids"]
    tails = [ids[9000 + TAIL_TOKENS * i : 9000 + TAIL_TOKENS * (i + 1)] for i in range(BRANCHES)]
    return [ids[:PREFIX_TOKENS] + tail for tail in tails]


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


def compare(results: dict[str, Any], records: Path) -> dict[str, Any]:
    """Every mode against transformers' model in float32."""
    from tests import oracle

    model = oracle.load_oracle(os.environ["M3_CHECKPOINT"]).to(DEVICE)
    asked = prompts()
    report: dict[str, Any] = {}
    for mode, result in results.items():
        error, regret, gaps = [], [], []
        for number, ids in enumerate(asked):
            tokens = result["tokens"][number]
            with torch.device(DEVICE):
                run = oracle.run(model, [*ids, *tokens[:-1]])
                logprobs = run.logprobs[len(ids) - 1 :]
                want = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
                error.append((want - torch.tensor(result["logprobs"][number])).abs())
                regret.append(logprobs.amax(1) - want)
                if mode in PLAIN:
                    others = results[PLAIN[mode]]["tokens"][number]
                    parted = first_difference(tokens, others)
                    if parted is not None:
                        gaps.append(round(float((logprobs[parted, others[parted]] - want[parted]).abs()), 4))
                if number == 0 and MODES[mode].records:
                    report[mode] = overlap(run.blocks, result["request_ids"][0], records / mode)
        if mode in PLAIN:
            report.setdefault(mode, {})["against_plain_decoding"] = {
                "mode": PLAIN[mode],
                "tokens_until_the_first_difference": until_parted(result, results[PLAIN[mode]], "tokens"),
                "the_same_in_the_first_round": until_parted(
                    result, results[PLAIN[mode]], "tokens_of_first_round"
                ),
                "nats_between_the_two_tokens_where_they_part": gaps,
            }
        errors = torch.cat(error)
        report.setdefault(mode, {}).update(
            logprob_error_mean=float(errors.mean()),
            logprob_error_median=float(errors.median()),
            logprob_error_of_first_tokens=[round(float(prompt[0]), 4) for prompt in error],
            logprob_errors_over_one_half=int((errors > 0.5).sum()),
            logprob_error_max=float(errors.max()),
            worst_distance_from_best_token=float(torch.cat(regret).max()),
        )
    if {"eager", "reference"} <= results.keys():
        report["eager"]["against_reference_operators"] = against(results, "eager", "reference", records)
    if "decode-graph" in results:
        for mode in results:
            if mode != "decode-graph" and (records / f"{mode}.cache").exists():
                report[mode]["cache_against_decode_graph"] = cache_differences(records, mode, "decode-graph")
    return report


def cache_differences(records: Path, mode: str, other: str) -> dict[str, str]:
    """Where two modes' caches of the first prompt part, per layer and cache.

    In words: the first token whose values differ in a bit, how many do, the mean relative difference, and how
    many differ by more than 5%, which is another expert or block and no rounding.
    """
    caches = [torch.load(records / f"{name}.cache") for name in (mode, other)]
    found = {}
    for (layer, kind), values in caches[0].items():
        ours, theirs = values.float().flatten(1), caches[1][layer, kind].float().flatten(1)
        relative = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
        differ = torch.where(relative > 0)[0].tolist()
        found[f"{kind} of layer {layer}"] = (
            f"from token {differ[0]}: {len(differ)} of {len(relative)}, mean {float(relative.mean()):.5f}, "
            f"{int((relative > 0.05).sum())} above 5%"
            if differ
            else "equal"
        )
    return found


def against(results: dict[str, Any], left: str, right: str, records: Path) -> dict[str, Any]:
    """Two modes side by side: log-probabilities up to the first different token, and recorded blocks."""
    ours, theirs = results[left], results[right]
    largest, same_tokens = 0.0, 0
    for left_tokens, right_tokens, left_logprobs, right_logprobs in zip(
        ours["tokens"], theirs["tokens"], ours["logprobs"], theirs["logprobs"]
    ):
        parted = first_difference(left_tokens, right_tokens)
        until = len(left_tokens) if parted is None else parted
        same_tokens += until
        gaps = [abs(a - b) for a, b in zip(left_logprobs[:until], right_logprobs[:until])]
        largest = max(largest, *gaps, 0.0)
    chosen = {
        mode: prompt_blocks(records / mode, result["request_ids"][0])
        for mode, result in ((left, ours), (right, theirs))
    }
    rows = chosen[left].keys() & chosen[right].keys()
    different = sum(not torch.equal(chosen[left][row], chosen[right][row]) for row in rows)
    return {
        "tokens_until_the_first_difference": same_tokens,
        "tokens": sum(map(len, ours["tokens"])),
        "logprob_difference_max": largest,
        "prompt_rows_and_layers": len(rows),
        "with_another_choice": different,
    }


def first_difference(left: list[int], right: list[int]) -> int | None:
    """The first index at which two answers of one length differ; None if nowhere."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), None)


def until_parted(ours: dict[str, Any], theirs: dict[str, Any], round_name: str) -> list[int]:
    """Of every answer of a round, the tokens before the first other one; `NEW_TOKENS` if there is none."""
    parted = map(first_difference, ours[round_name], theirs[round_name])
    return [NEW_TOKENS if index is None else index for index in parted]


def prompt_blocks(record_dir: Path, request_id: str) -> dict[tuple[int, int], torch.Tensor]:
    """(layer, position) -> chosen blocks of a request's recorded prompt tokens."""
    from sglang_m3.attention import recorder

    found: dict[tuple[int, int], torch.Tensor] = {}
    for step in recorder.load(record_dir):
        if request_id not in step.request_ids:
            continue
        for row in torch.where(step.request == step.request_ids.index(request_id))[0].tolist():
            position = int(step.position[row])
            if position < PREFIX_TOKENS + TAIL_TOKENS:
                found |= {(layer, position): blocks[:, row] for layer, blocks in step.chosen.items()}
    return found


def overlap(oracle_blocks: dict[int, torch.Tensor], request_id: str, record_dir: Path) -> dict[str, Any]:
    """How many of the oracle's blocks the request's recorded rows chose."""
    from sglang_m3.attention import recorder

    same = total = 0
    for step in recorder.load(record_dir):
        if request_id not in step.request_ids:
            continue
        rows = torch.where(step.request == step.request_ids.index(request_id))[0].cpu()
        rows = rows[step.position.cpu()[rows] < oracle_blocks[min(oracle_blocks)].shape[1]]
        for layer, chosen in step.chosen.items():
            got = chosen.cpu()[:, rows]
            want = oracle_blocks[layer].cpu()[:, step.position.cpu()[rows].long()]
            hit = (got[..., :, None] == want[..., None, :]) & (got[..., :, None] >= 0)
            same, total = same + int(hit.sum()), total + int((want >= 0).sum())
    return {"blocks_recorded": total, "share_of_blocks_as_in_float32": same / max(1, total)}


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
        if PLAIN.get(mode, mode) not in arguments.modes:
            parser.error(f"mode {mode} is compared with {PLAIN[mode]}, which is not among --modes")
    from sglang_m3.tiny import TinyConfig, build

    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp())
    checkpoint = build(
        scratch / "m3", TinyConfig(hidden=512, heads=64, kv_heads=4, head_dim=128, topk_blocks=16)
    )
    with ThreadPoolExecutor(arguments.together) as pool:
        answers = pool.map(lambda mode: child(mode, arguments.out, scratch, checkpoint), arguments.modes)
        results = dict(zip(arguments.modes, answers))
    served = {
        mode: result
        for mode, result in results.items()
        if result is not None and results[PLAIN.get(mode, mode)] is not None
    }
    arguments.out.write_text(json.dumps(served))
    compared = child("compare", arguments.out, scratch, checkpoint)
    arguments.out.write_text(json.dumps({"served": served, "compared": compared}))
    failed = [mode for mode, result in results.items() if result is None]
    if failed or compared is None:
        sys.exit(f"failed: {', '.join(failed) or 'compare'}")
    wrong = [f"{mode}: {reason}" for mode in compared if (reason := what_is_wrong(mode, compared[mode]))]
    if wrong:
        sys.exit("\n".join(wrong))


def what_is_wrong(mode: str, found: dict[str, Any]) -> str:
    """Why a mode's answers are not the model's; "" if its dtype explains all differences."""
    mean, median = found["logprob_error_mean"], found["logprob_error_median"]
    in_float32 = MODES[mode].flags.get("dtype") == "float32"
    if mean > (LARGEST_MEAN_ERROR_FLOAT32 if in_float32 else LARGEST_MEAN_ERROR):
        return f"the mean error is {mean}"
    if median > LARGEST_MEDIAN_ERROR:
        return f"the median error is {median}"
    plain = found.get("against_plain_decoding", {})
    for name in ("tokens_until_the_first_difference", "the_same_in_the_first_round"):
        if in_float32 and set(plain.get(name, ())) - {NEW_TOKENS}:
            return f"other tokens than {plain['mode']}: {name} {plain[name]}"
    return ""


if __name__ == "__main__":
    main()
