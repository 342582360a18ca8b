"""A trace's time lands in the step and the part that it was spent in, all of it and once."""

from __future__ import annotations

import ast
import gzip
import json
from pathlib import Path

import m3_kernels
import pytest

from bench_serving import breakdown
from bench_serving.breakdown import GAPS, part_of, steps, summarise


def event(category: str, name: str, begin: float, length: float, correlation: int | None = None) -> dict:
    made = {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length, "tid": 1, "args": {}}
    if correlation is not None:
        made["args"] = {"correlation": correlation}
    return made


def decode_step(begin: float, first: int, gpu_delay: float = 500.0) -> list[dict]:
    """A step whose two launches, one of a whole graph, run four kernels much later than the host's span."""
    gpu = begin + gpu_delay
    return [
        event("user_annotation", "step[DECODE bs=8]", begin, 100),
        event("cuda_runtime", "cudaLaunchKernel", begin + 10, 5, first),
        event("cuda_runtime", "cudaGraphLaunch", begin + 20, 5, first + 1),
        event("kernel", "rmsnorm_kernel", gpu, 10, first),
        event("kernel", "_score_kernel", gpu + 15, 20, first + 1),
        event("kernel", "nvjet_gemm", gpu + 35, 30, first + 1),
        event("kernel", "attend_tiles", gpu + 55, 20, first + 1),
    ]


def test_kernels_belong_to_the_step_that_launched_them() -> None:
    # The first step's kernels run during the second step's span.
    events = [*decode_step(0, 1), *decode_step(450, 11)]
    events.append(event("kernel", "elementwise_kernel", 700, 5, 99))  # launched outside of any step
    first, second = steps(events)
    for step in (first, second):
        assert (step.stage, step.requests, step.tokens) == ("DECODE", 8, 0)
        assert step.microseconds == 75
        # The gemm and the attention overlap by 10: that time is the earlier one's.
        assert step.parts == {
            "norms and rope": 10, "selection": 20, "linears": 30, "attention": 10, GAPS: 5,
        }  # fmt: skip
        assert sum(step.parts.values()) == step.microseconds
    summary = summarise([first, second], back_to_back=True)
    assert summary.microseconds == 75 and summary.between_microseconds == 450 - 75
    assert sum(summary.parts.values()) == pytest.approx(75)


def test_extend_steps_say_their_tokens() -> None:
    (step,) = steps(
        [
            event("user_annotation", "step[EXTEND bs=2 toks=512]", 0, 100),
            event("cuda_runtime", "cudaLaunchKernel", 1, 5, 1),
            event("kernel", "fused_moe_kernel", 50, 10, 1),
        ]
    )
    assert (step.stage, step.requests, step.tokens) == ("EXTEND", 2, 512)
    assert step.parts == {"MoE": 10, GAPS: 0}


def test_without_a_gpu_operators_count_by_their_own_time() -> None:
    (step,) = steps(
        [
            event("user_annotation", "step[DECODE bs=1]", 0, 100),
            event("cpu_op", "aten::linear", 10, 40),
            event("cpu_op", "aten::addmm", 15, 30),
            event("cpu_op", "aten::copy_", 20, 5),
            event("cpu_op", "aten::mul", 60, 10),
            event("cpu_op", "aten::mul", 200, 10),  # outside of the step
        ]
    )
    assert step.microseconds == 60
    assert step.parts == {"linears": 35, "copies and elementwise": 5, "other": 10, GAPS: 10}
    assert step.kernels == {"aten::linear": 10, "aten::addmm": 25, "aten::copy_": 5, "aten::mul": 10}


def test_a_trace_is_read_gzipped_or_not(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": decode_step(0, 1)})
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(text.encode()))
    assert breakdown.read(tmp_path / "a.json") == breakdown.read(tmp_path / "b.json.gz") == decode_step(0, 1)


def test_no_step_is_an_error() -> None:
    with pytest.raises(ValueError, match="no such step"):
        summarise(steps([]), back_to_back=False)


def triton_kernels() -> dict[str, str]:
    """Every Triton function of ours that is launched, and the file it is in."""
    found = {}
    for path in sorted((Path(m3_kernels.__file__).parent / "triton").glob("sm90_*.py")):
        tree = ast.parse(path.read_text())
        launched = {
            node.func.value.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Subscript)
            and isinstance(node.func.value, ast.Name)
        }
        for name in launched:
            found[name] = path.stem.removeprefix("sm90_")
    return found


OURS = {
    "plan_prefix": "selection",
    "score_blocks": "selection",
    "select_blocks": "selection",
    "choose_blocks": "selection",
    "attend_blocks": "attention",
    "store_tokens": "cache writes",
}


def test_our_kernels_are_in_the_part_of_their_operator() -> None:
    kernels = {name: file for name, file in triton_kernels().items() if file in OURS}
    assert {OURS[file] for file in kernels.values()} == set(OURS.values())
    wrong = {name: part_of(name) for name, file in kernels.items() if part_of(name) != OURS[file]}
    assert wrong == {}


THEIRS = {
    "_decode_score_attn_kernel": "selection",
    "_flash_attn_fwd_with_block_score_kernel": "selection",
    "_topk_index_merge_kernel": "selection",
    "_gqa_share_sparse_fwd_kernel": "attention",
    "_gqa_share_sparse_decode_kernel_impl": "attention",
    "_fwd_grouped_kernel_stage1": "attention",
    "_fwd_kernel_stage2": "attention",
    "create_flashinfer_kv_indices_triton": "attention",
    "fused_moe_kernel": "MoE",
    "moe_align_block_size_kernel": "MoE",
    "_sparse_qk_index_gemma_rmsnorm_rope_cache_kernel": "norms and rope",
    "nvjet_tst_128x64_64x8_1x2_h_bz_coopA_TNT": "linears",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>": "linears",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "collectives",
    "Memcpy DtoD (Device -> Device)": "copies and elementwise",
    "void at::native::vectorized_elementwise_kernel<4>": "copies and elementwise",
    "a_kernel_nobody_knows": "other",
}


@pytest.mark.parametrize(("kernel", "part"), THEIRS.items())
def test_sglang_s_kernels_are_in_the_part_of_their_work(kernel: str, part: str) -> None:
    assert part_of(kernel) == part
