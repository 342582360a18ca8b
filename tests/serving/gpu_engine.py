"""On a Hopper GPU: the model served by the plugin and by stock SGLang, against transformers.

    python -m tests.serving.gpu_engine [--out FILE]

Builds a seeded checkpoint with M3's head sizes, serves it in bfloat16 three times (plugin with CUDA graphs,
plugin without and with its selections recorded, stock), and compares with transformers' own model in
float32: the errors of log-probabilities, the overlap of chosen blocks, the tokens of graph and eager runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any

import torch

PREFIX_TOKENS, TAIL_TOKENS, NEW_TOKENS, BRANCHES = 5000, 60, 48, 8
FLAGS = {
    "dtype": "bfloat16",
    "chunked_prefill_size": 2048,
    "max_total_tokens": 65536,
    "context_length": 16384,
    "log_level": "warning",
    "skip_tokenizer_init": True,
    "random_seed": 1,
    "page_size": 128,
}
GPU_FLAGS = {"attention_backend": "triton", "sampling_backend": "pytorch", "cuda_graph_max_bs_decode": 8}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Without a GPU `--modes eager` still runs, to try the script itself."""


def prompts(vocab: int) -> list[list[int]]:
    """One prefix, eight tails: token ids of the standard library's source."""
    import inspect
    import random

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(os.environ["M3_CHECKPOINT"])
    ids = tokenizer(inspect.getsource(inspect) + inspect.getsource(random))["input_ids"]
    assert max(ids) < vocab
    tails = [ids[9000 + TAIL_TOKENS * i : 9000 + TAIL_TOKENS * (i + 1)] for i in range(BRANCHES)]
    return [ids[:PREFIX_TOKENS] + tail for tail in tails]


def serve(mode: str) -> dict[str, Any]:
    """Generate with one engine; runs in a process of its own."""
    import sglang

    begin = time.monotonic()
    flags = (
        FLAGS
        | (GPU_FLAGS if DEVICE == "cuda" else {})
        | ({"disable_cuda_graph": True} if mode == "eager" else {})
    )
    engine = sglang.Engine(model_path=os.environ["M3_CHECKPOINT"], **flags)
    started = time.monotonic() - begin
    asked = prompts(10**9)
    engine.generate(input_ids=asked[0], sampling_params={"max_new_tokens": 1})
    request = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    answers, seconds = None, []
    for _ in range(2):
        begin = time.monotonic()
        answers = engine.generate(input_ids=asked, sampling_params=request, return_logprob=True)
        seconds.append(round(time.monotonic() - begin, 3))
    result = {
        "start_seconds": round(started, 1),
        "batch_seconds": seconds,
        "tokens": [answer["output_ids"] for answer in answers],
        "logprobs": [[v for v, _, _ in a["meta_info"]["output_token_logprobs"]] for a in answers],
        "cached_tokens": [answer["meta_info"]["cached_tokens"] for answer in answers],
        "request_ids": [answer["meta_info"]["id"] for answer in answers],
    }
    engine.shutdown()
    return result


def oracle_errors(results: dict[str, Any], record_dir: Path) -> dict[str, Any]:
    """Errors of every mode against the float32 model, and the overlap of the recorded selections."""
    from sglang_m3.attention import recorder
    from tests import oracle

    model = oracle.load_oracle(os.environ["M3_CHECKPOINT"]).to(DEVICE)
    torch.set_default_device(DEVICE)
    report: dict[str, Any] = {}
    asked = prompts(10**9)
    for mode, result in results.items():
        worst, total, count = 0.0, 0.0, 0
        for ids, tokens, logprobs in zip(asked[:3], result["tokens"], result["logprobs"]):
            run = oracle.run(model, [*ids, *tokens[:-1]])
            want = run.logprobs[len(ids) - 1 :].gather(1, torch.tensor(tokens)[:, None])[:, 0]
            error = (want - torch.tensor(logprobs)).abs()
            worst, total, count = (
                max(worst, float(error.max())),
                total + float(error.sum()),
                count + len(tokens),
            )
        report[mode] = {"logprob_error_max": worst, "logprob_error_mean": total / count}
    run = oracle.run(model, [*asked[0], *results["eager"]["tokens"][0][:-1]])
    same = chosen_total = 0
    wanted_id = results["eager"]["request_ids"][0]
    for step in recorder.load(record_dir):
        if wanted_id not in step.request_ids:
            continue
        rows = torch.where(step.request.to(DEVICE) == step.request_ids.index(wanted_id))[0]
        for layer, chosen in step.chosen.items():
            got = chosen.to(DEVICE)[:, rows]
            want = run.blocks[layer].to(DEVICE)[:, step.position.to(DEVICE)[rows].long()]
            hit = (got[..., :, None] == want[..., None, :]) & (got[..., :, None] >= 0)
            same, chosen_total = same + int(hit.sum()), chosen_total + int((want >= 0).sum())
    report["recorded_selection_overlap"] = same / max(1, chosen_total)
    report["recorded_blocks"] = chosen_total
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=("graph", "eager", "stock", "oracle"))
    parser.add_argument("--out", type=Path, default=Path("gpu_engine.json"))
    parser.add_argument("--modes", nargs="+", default=["graph", "eager", "stock"])
    arguments = parser.parse_args()
    if arguments.mode is not None:
        if arguments.mode == "oracle":
            results = json.loads(arguments.out.read_text())
            result = oracle_errors(results, Path(os.environ["M3_RECORD"]))
        else:
            result = serve(arguments.mode)
        print("RESULT " + json.dumps(result))
        return
    from sglang_m3.tiny import TinyConfig, build

    scratch = Path(tempfile.mkdtemp())
    record_dir = scratch / "blocks"
    record_dir.mkdir()
    checkpoint = build(
        scratch / "m3", TinyConfig(hidden=512, heads=64, kv_heads=4, head_dim=128, topk_blocks=16)
    )
    base = {**os.environ, "M3_CHECKPOINT": str(checkpoint), "M3_RECORD": str(record_dir)}
    extra = {
        "graph": {},
        "eager": {"SGLANG_M3_RECORD_BLOCKS": str(record_dir)},
        "stock": {"SGLANG_PLUGINS": "none"},
        "oracle": {},
    }
    results: dict[str, Any] = {}
    for mode in (*arguments.modes, "oracle"):
        command = [
            sys.executable,
            "-m",
            "tests.serving.gpu_engine",
            "--mode",
            mode,
            "--out",
            str(arguments.out),
        ]
        done = subprocess.run(command, env=base | extra[mode], capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            print(
                f"== {mode} failed ({done.returncode})\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}",
                flush=True,
            )
            sys.exit(f"{mode} failed")
        results[mode] = json.loads(lines[-1].removeprefix("RESULT "))
        shown = {k: v for k, v in results[mode].items() if k not in ("tokens", "logprobs", "request_ids")}
        print(f"== {mode}: {json.dumps(shown)}", flush=True)
        arguments.out.write_text(json.dumps(results))
    if {"graph", "eager"} <= results.keys():
        graph, eager = results["graph"], results["eager"]
        tokens = zip(chain(*graph["tokens"]), chain(*eager["tokens"]))
        logprobs = zip(chain(*graph["logprobs"]), chain(*eager["logprobs"]))
        differ = sum(a != b for a, b in tokens)
        largest = max(abs(a - b) for a, b in logprobs)
        print(f"graph and eager: {differ} tokens differ, log-probabilities by at most {largest:.2e}")


if __name__ == "__main__":
    main()
