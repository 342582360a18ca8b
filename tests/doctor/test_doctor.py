"""What the doctor says of the published checkpoints on named machines, and of a folder on this one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from bench_serving import one_rank
from sglang_m3 import hardware
from sglang_m3.config import M3Config
from sglang_m3.doctor import machine, published
from sglang_m3.doctor.diagnosis import Diagnosis, diagnose
from sglang_m3.doctor.machine import named
from sglang_m3.doctor.resolve import Resolution
from sglang_m3.tiny import build

NODE = ("--tp-size", "8", "--ep-size", "8")
MXFP8 = ("--model-path", "MiniMaxAI/MiniMax-M3-MXFP8")
PUBLISHED_COMMAND = (
    *MXFP8, *NODE, "--trust-remote-code", "--mem-fraction-static", "0.8", "--enable-multimodal",
    "--quantization", "mxfp8", "--dtype", "bfloat16", "--attention-backend", "flashinfer",
    "--moe-runner-backend", "deep_gemm", "--chunked-prefill-size", "8192", "--reasoning-parser", "minimax-m3",
)  # fmt: skip

CASES: dict[str, tuple[str, ...]] = {
    "bf16 on h200": ("--as", "h200x8", *NODE),
    "text": ("--as", "h200x8", *NODE),
    "mxfp8 on h200": ("--as", "h200x8", *PUBLISHED_COMMAND),
    "bf16 on h100": ("--as", "h100x8", *NODE),
    "mxfp8 on h100": ("--as", "h100x8", *NODE, "--model-path", "minimaxai/minimax-m3-mxfp8"),
    "half a node": ("--as", "h200x4", *NODE),
    "two nodes": ("--as", "h100x8", "--tp-size", "16", "--ep-size", "16", "--nnodes", "2"),
    "page size": ("--as", "h200x8", *NODE, "--page-size", "64"),
    "override": ("--as", "h200x8", *NODE, "--json-model-override-args", '{"head_dim": 64}'),
    "three ranks": ("--as", "h200x8", "--tp-size", "3"),
    "nvfp4 on b200": ("--as", "b200x8", *NODE, "--model-path", "nvidia/MiniMax-M3-NVFP4"),
    "m3.1 on h200": ("--as", "h200x8", *NODE, "--model-path", "MiniMaxAI/MiniMax-M3.1-Flash"),
    "cpu": ("--as", "cpu"),
    "unknown flag": ("--as", "h200x8", "--tpsize", "8"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit status and output. In a process of its own: what SGLang takes the machine for is settled once."""
    tiny = build(tmp_path_factory.mktemp("doctor") / "tiny")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        here = {"here": ("--model-path", str(tiny), "--port", port)} if hardware.target() == "cpu" else {}
        file = tiny.parent / "flags.yaml"
        file.write_text(f"model-path: {MXFP8[1]}\ntp-size: 8\n")
        cases = CASES | here | {"file": ("--as", "h200x8", "--config", str(file), "--ep-size", "8")}
        lines = [[*arguments, *([] if name == "text" else ["--json"])] for name, arguments in cases.items()]
        inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.doctor.many"],
            input=json.dumps(lines),
            capture_output=True,
            text=True,
            env=inherited | {"HF_HUB_OFFLINE": "1"},
        )
    assert done.returncode == 0, done.stderr[-3000:]
    results = dict(zip(cases, map(tuple, json.loads(done.stdout))))
    return results | {"port": (0, port)}


def said(answers: dict[str, tuple[int, str]], name: str) -> dict[str, Any]:
    status, output = answers[name]
    answer = json.loads(output)
    assert status == (0 if answer["starts"] else 1)
    assert answer["starts"] == (not answer["problems"])
    return answer


@pytest.mark.long
def test_the_bf16_checkpoint_on_eight_h200(answers: dict[str, tuple[int, str]]) -> None:
    answer = said(answers, "bf16 on h200")
    assert answer["starts"], answer["problems"]
    resolved = {name: value["resolved"] for name, value in answer["flags"].items()}
    assert (resolved["page_size"], resolved["attention_backend"]) == (128, "fa3")
    assert resolved["moe_runner_backend"] == "triton" and resolved["chunked_prefill_size"] == 8192
    assert answer["flags"]["tp_size"] == {"given": 8, "resolved": 8}
    assert answer["flags"]["page_size"]["given"] is None
    assert {name for name, value in answer["flags"].items() if value["given"] is not None} == {
        "tp_size",
        "ep_size",
    }
    assert "sm90" in answer["operators"]["sparse layers: choose_blocks"]
    assert resolved["cuda_graph_config"]["prefill"]["backend"] == "breakable"
    assert answer["memory"]["weights"]["experts"] == 128 * 3 * 6144 * 3072 * 57 * 2 // 8
    assert answer["memory"]["tokens"] > 200_000
    assert any("longest request" in note for note in answer["notes"])


@pytest.mark.long
def test_flags_of_a_file_are_read(answers: dict[str, tuple[int, str]]) -> None:
    answer = said(answers, "file")
    assert answer["starts"] and answer["model"] == MXFP8[1]
    assert (answer["flags"]["tp_size"]["given"], answer["flags"]["ep_size"]["given"]) == (8, 8)


@pytest.mark.long
def test_the_published_command_on_eight_h200(answers: dict[str, tuple[int, str]]) -> None:
    answer = said(answers, "mxfp8 on h200")
    assert answer["starts"], answer["problems"]
    assert answer["flags"]["quantization"] == {"given": "mxfp8", "resolved": "m3_mxfp8"}
    # The runner asks for DeepGEMM, which rounds activations: the one approximation is named.
    assert answer["operators"]["experts"].startswith("DeepGEMM with FP8 activations for many tokens")
    assert "m3_kernels.mxfp8_experts" in answer["operators"]["experts"]
    assert answer["memory"]["tokens"] > 1_048_576


@pytest.mark.long
def test_what_does_not_fit_is_a_problem_with_a_remedy(answers: dict[str, tuple[int, str]]) -> None:
    (problem,) = said(answers, "bf16 on h100")["problems"]
    assert "no room for the cache" in problem and "MXFP8" in problem
    assert said(answers, "mxfp8 on h100")["starts"]
    (problem,) = said(answers, "half a node")["problems"]
    assert "need 8 GPUs" in problem and "have 4" in problem
    assert said(answers, "two nodes")["memory"]["tokens"] > 0
    problems = said(answers, "three ranks")["problems"]
    assert any("64 attention heads" in problem for problem in problems), problems


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("page size", ("--page-size 64", "pass 128")),
        ("override", ("head_dim", '{"text_config": {"head_dim": 64}}')),
    ],
)
def test_a_refusal_is_told_as_a_server_tells_it(
    answers: dict[str, tuple[int, str]], name: str, words: tuple[str, ...]
) -> None:
    (problem,) = said(answers, name)["problems"]
    assert all(word in problem for word in words), problem


@pytest.mark.long
def test_what_is_left_to_sglang_is_said(answers: dict[str, tuple[int, str]]) -> None:
    answer = said(answers, "nvfp4 on b200")
    assert answer["starts"] and answer["memory"] is None
    assert answer["operators"]["sparse attention"] == "SGLang's own"
    assert any("left as it is" in note for note in answer["notes"])
    answer = said(answers, "m3.1 on h200")
    assert answer["starts"] and any("left to it" in note for note in answer["notes"])


@pytest.mark.long
def test_a_machine_without_a_gpu_can_be_named(answers: dict[str, tuple[int, str]]) -> None:
    answer = said(answers, "cpu")
    resolved = {name: value["resolved"] for name, value in answer["flags"].items()}
    assert (resolved["attention_backend"], resolved["page_size"]) == ("torch_native", 128)
    assert "reference" in answer["operators"]["sparse layers: choose_blocks"]


@pytest.mark.long
def test_people_read_the_same_and_programs_get_an_exit_status(answers: dict[str, tuple[int, str]]) -> None:
    status, text = answers["text"]
    assert status == 0
    for words in ("--page-size", "fa3", "choose_blocks", "experts", "tokens of 30,720 bytes", "would start"):
        assert words in text, text
    status, _ = answers["unknown flag"]
    assert status == 2


@pytest.mark.long
def test_a_folder_on_this_machine_and_a_taken_port(answers: dict[str, tuple[int, str]]) -> None:
    if "here" not in answers:
        pytest.skip("the expectations are those of a machine without a GPU")
    answer = said(answers, "here")
    (problem,) = answer["problems"]
    assert f"port {answers['port'][1]}" in problem and "--port" in problem
    assert answer["flags"]["attention_backend"]["resolved"] == "torch_native"
    assert answer["operators"]["sparse layers: attend_blocks"].endswith("reference")


def judged(machine: str, config: M3Config | None, error: str | None = None, **flags: Any) -> Diagnosis:
    """The diagnosis of resolved flags, without SGLang's resolution."""
    view = {
        "quantization": None, "dtype": "auto", "kv_cache_dtype": "auto", "mem_fraction_static": 0.8,
        "tp_size": 1, "ep_size": 1, "pp_size": 1, "dp_size": 1, "enable_dp_attention": False, "nnodes": 1,
        "chunked_prefill_size": 8192, "max_running_requests": 64, "context_length": None,
        "max_total_tokens": None, "speculative_num_draft_tokens": None, "attention_backend": "fa3",
        "moe_runner_backend": "triton",
    }  # fmt: skip
    return diagnose(
        Resolution("model", SimpleNamespace(**view | flags), flags, config, error), named(machine)
    )


RELEASED = M3Config.read(published.config_of("MiniMaxAI/MiniMax-M3"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "no room for the cache"),
        ({"tp_size": 16}, "need 16 GPUs"),
        ({"tp_size": 3}, "64 attention heads cannot be divided"),
        ({"tp_size": 8, "ep_size": 3}, "--ep-size"),
        ({"tp_size": 8, "ep_size": 16}, "--ep-size"),
        ({"tp_size": 8, "mem_fraction_static": 0.7}, "no room for the cache"),
    ],
    ids=str,
)
def test_sizes_that_cannot_work_are_problems(flags: dict[str, Any], words: str) -> None:
    problems = judged("h200x8", RELEASED, **flags).problems
    assert any(words in problem for problem in problems), problems


def test_without_a_gpu_the_remedy_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_host_memory", lambda: 2**34)
    (problem,) = judged("cpu", RELEASED).problems
    assert "no room for the cache" in problem and "use a machine with more memory" in problem


def test_sizes_that_work_are_none() -> None:
    assert judged("h200x8", RELEASED, tp_size=8, ep_size=8).starts
    assert judged("h200x4", RELEASED, tp_size=8, nnodes=2).starts


def test_an_error_of_the_resolution_is_the_problem_and_leaves_operators_out() -> None:
    diagnosis = judged("h200x8", None, "what SGLang says", tp_size=8)
    assert diagnosis.problems == ["what SGLang says"] and diagnosis.operators == {}


@pytest.mark.parametrize(("backend", "prefill"), [("triton", "attend_blocks"), ("fa3", "SGLang's fa3")])
def test_dense_layers_prefill_by_the_operator_where_triton_would(backend: str, prefill: str) -> None:
    small = {"tp_size": 8, "chunked_prefill_size": 128}
    operators = judged("h200x8", RELEASED, attention_backend=backend, **small).operators
    assert prefill in operators["dense layers: prefill"]
    assert "attend_blocks" in operators["dense layers: decode"]
    operators = judged("cpu", RELEASED, attention_backend="torch_native", **small).operators
    for phase in ("prefill", "decode"):
        assert operators[f"dense layers: {phase}"] == "SGLang's torch_native"


def test_element_sizes_follow_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = judged("h200x8", RELEASED, tp_size=8).memory
    monkeypatch.setenv("SGLANG_M3_INDEX_DTYPE", "fp8_e4m3")
    small = judged("h200x8", RELEASED, tp_size=8, kv_cache_dtype="fp8_e4m3", quantization="mxfp8").memory
    assert plain is not None and small is not None
    assert (plain.kv_per_token, small.kv_per_token) == (30_720, 15_360)
    assert (plain.index_per_token, small.index_per_token) == (14_592, 7_296)
    assert small.weights.experts * 64 == plain.weights.experts * 33


def test_memory_is_that_of_a_server_that_ran() -> None:
    """SGLang 0.5.23 with the plugin on one H200, one rank of eight in BF16 (`bench_serving.one_rank --of 8`),
    `--mem-fraction-static 0.85 --chunked-prefill-size 8192 --max-running-requests 32 --page-size 128
    --context-length 131072 --load-format dummy`: what its log said, in GiB where SGLang writes GB."""
    config = M3Config.read(one_rank.config(one_rank.Rank(of=8)))
    memory = judged(
        "h200x1", config, mem_fraction_static=0.85, max_running_requests=32, context_length=131_072
    ).memory
    assert memory is not None
    keys = config.num_hidden_layers * config.head_dim * 2
    said = {
        "weights": (100.215, (memory.weights.total + memory.rotary_table) / 2**30),
        "vision cache": (0.10, memory.vision_cache / 2**30),
        "tokens": (417_280, memory.tokens),
        "keys": (5.97, memory.tokens * keys / 2**30),
        "keys and values": (2 * 5.97, memory.tokens * memory.kv_per_token / 2**30),
        "index keys": (5.67, memory.tokens * memory.index_per_token / 2**30),
    }
    for what, (measured, predicted) in said.items():
        assert predicted == pytest.approx(measured, rel=0.03 if what == "vision cache" else 0.01), what
    assert named("h200x1").free_bytes / 2**30 == pytest.approx(139.09, abs=0.01)
    assert 0 < memory.workspaces < 0.4 * 2**30


@pytest.mark.parametrize("name", ["h200", "h200x0", "a100x8", "H200x8", ""])
def test_machines_that_are_not_known_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no machine"):
        named(name)
