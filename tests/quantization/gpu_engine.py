"""On a Hopper GPU: an MXFP8 checkpoint served by the plugin, in both layouts, against transformers, and the
BF16 checkpoint that it was made of, quantised while loading.

    python -m tests.quantization.gpu_engine [REQUESTS]

Builds a seeded MXFP8 checkpoint with M3's head sizes, serves it with CUDA graphs in `fast` and in `exact` at
the same time, and compares log-probabilities with those of transformers' own model, dequantised, in float32.
The BF16 checkpoint is served with `--quantization mxfp8` in `fast`: its weights are the same bytes, so what
differs from `fast` is how the scheduler put requests into steps.
`REQUESTS` (4) run at once, so that many tokens are in a decode step, on which the choice of kernels depends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

PROMPT_TOKENS, NEW_TOKENS = 3000, 24
REQUESTS = int(sys.argv[1]) if len(sys.argv) > 1 else 4
APART_TOKENS = 700
"""Between the places where the prompts of two requests begin."""
LOADED = "quantised while loading"
LARGEST_MEAN_ERROR = 0.06
"""Of log-probabilities, in nats: BF16's own on this model (`tests.serving.gpu_engine`)."""
FLAGS = {
    "dtype": "bfloat16",
    "chunked_prefill_size": 2048,
    "max_total_tokens": 4096 * (REQUESTS + 4),
    "context_length": 16384,
    "log_level": "info",
    "skip_tokenizer_init": True,
    "random_seed": 1,
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "cuda_graph_max_bs_decode": REQUESTS,
    "mem_fraction_static": 0.9,
    "moe_runner_backend": "deep_gemm",
}


def prompts() -> list[list[int]]:
    """Token ids of the standard library's source, from another place for every request."""
    import inspect
    import random

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(os.environ["M3_CHECKPOINT"])
    ids = tokenizer(inspect.getsource(inspect) + inspect.getsource(random))["input_ids"]
    assert len(ids) >= APART_TOKENS * (REQUESTS - 1) + PROMPT_TOKENS, f"text for {len(ids)} tokens"
    return [ids[APART_TOKENS * i :][:PROMPT_TOKENS] for i in range(REQUESTS)]


def serve() -> dict[str, Any]:
    """Generate with one engine; runs in a process of its own."""
    import sglang

    begin = time.monotonic()
    flags = FLAGS | json.loads(os.environ["M3_FLAGS"])
    engine = sglang.Engine(model_path=os.environ["M3_CHECKPOINT"], **flags)
    ready = time.monotonic()
    request = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    answers = engine.generate(input_ids=prompts(), sampling_params=request, return_logprob=True)
    engine.shutdown()
    findings = [json.loads(line) for line in Path(os.environ["SHADOW_FILE"]).read_text().splitlines()]
    met = {f["kernel"] for f in findings if f["op"] == "compile" and f["at"] > ready}
    return {
        "start_seconds": round(ready - begin, 1),
        "kernels_first_met_while_serving": sorted(met),
        "tokens": [answer["output_ids"] for answer in answers],
        "logprobs": [[v for v, _, _ in a["meta_info"]["output_token_logprobs"]] for a in answers],
    }


def compare(results: dict[str, Any], numbers: Path) -> dict[str, float]:
    """Print the errors of every layout's log-probabilities; returns their means."""
    from tests import oracle

    model = oracle.load_oracle(numbers).to("cuda")
    torch.set_default_device("cuda")
    means = {}
    for name, result in results.items():
        errors = []
        for ids, tokens, logprobs in zip(prompts(), result["tokens"], result["logprobs"]):
            run = oracle.run(model, [*ids, *tokens[:-1]])
            want = run.logprobs[len(ids) - 1 :].gather(1, torch.tensor(tokens)[:, None])[:, 0]
            errors.append((want - torch.tensor(logprobs)).abs())
        error = torch.cat(errors)
        means[name] = float(error.mean())
        print(
            f"{name}: started in {result['start_seconds']} s, log-probability error over "
            f"{error.numel()} tokens: mean {means[name]:.4f}, median {float(error.median()):.4f}, "
            f"largest {float(error.max()):.4f}; kernels first met while serving: "
            f"{', '.join(result['kernels_first_met_while_serving']) or 'none'}",
            flush=True,
        )
    return means


def main() -> None:
    if "M3_CHECKPOINT" in os.environ:
        print("RESULT " + json.dumps(serve()))
        return
    from sglang_m3.tiny import TinyConfig, build
    from tests.quantization.edited import dequantise, edited

    scratch = Path(tempfile.mkdtemp())
    shape = TinyConfig(
        hidden=512,
        heads=64,
        kv_heads=4,
        head_dim=128,
        topk_blocks=16,
        expert_intermediate=256,
    )
    plain = build(scratch / "plain", shape)
    checkpoint = build(scratch / "m3", replace(shape, quantize="mxfp8"))
    numbers = edited(checkpoint, scratch / "numbers", dequantise, declared=False)
    command = [sys.executable, "-m", "tests.quantization.gpu_engine", str(REQUESTS)]
    running = {}
    quantised: dict[str, str] = {}
    for name, layout, served, flags in (
        ("fast", "fast", checkpoint, quantised),
        ("exact", "exact", checkpoint, quantised),
        (LOADED, "fast", plain, {"quantization": "mxfp8"}),
    ):
        findings = scratch / f"{name}.jsonl"
        findings.touch()
        shadow = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "tests.serving.shadow", "SHADOW_FILE": str(findings)}
        running[name] = subprocess.Popen(
            command,
            env={
                **os.environ,
                **shadow,
                "M3_CHECKPOINT": str(served),
                "M3_FLAGS": json.dumps(flags),
                "SGLANG_M3_MXFP8": layout,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    results = {}
    for name, process in running.items():
        output, _ = process.communicate()
        lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
        for line in output.splitlines():
            if "sglang-m3" in line or ("changed" in line and "layers.1." in line):
                print(f"{name}: {line}")
        if not lines:
            print(f"== {name} failed\n{output[-6000:]}", flush=True)
            continue
        results[name] = json.loads(lines[-1].removeprefix("RESULT "))
    os.environ["M3_CHECKPOINT"] = str(checkpoint)
    errors = compare(results, numbers)
    if len(results) < len(running):
        sys.exit("failed: " + ", ".join(running.keys() - results.keys()))
    same = [a == b for a, b in zip(results[LOADED]["tokens"], results["fast"]["tokens"])]
    print(f"{LOADED}: {sum(same)} of {len(same)} answers have the tokens of `fast`")
    beyond = [name for name, mean in errors.items() if mean > LARGEST_MEAN_ERROR]
    if beyond:
        sys.exit(f"beyond {LARGEST_MEAN_ERROR} in the mean: {', '.join(beyond)}")


if __name__ == "__main__":
    main()
