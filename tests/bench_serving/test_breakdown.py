"""A trace's time lands in the step and the part that it was spent in, all of it and once."""

from __future__ import annotations

import ast
import gzip
import json
from pathlib import Path

import m3_kernels
import pytest

from bench_serving import breakdown
from bench_serving.breakdown import TraceError, steps, summarise
from bench_serving.step_parts import (
    GAPS,
    GRAPH_GAPS,
    OTHER,
    OURS,
    PART_NAMES,
    part_of,
    part_of_file,
    without_parameters,
)


def event(category: str, name: str, begin: float, length: float, correlation: int | None = None) -> dict:
    made = {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length, "tid": 1, "args": {}}
    if correlation is not None:
        made["args"] = {"correlation": correlation}
    return made


def decode_step(begin: float, first: int, gpu_delay: float = 500.0, requests: int = 8) -> list[dict]:
    """A step whose two launches, one of a whole graph, run four kernels much later than the host's span."""
    gpu = begin + gpu_delay
    return [
        event("user_annotation", f"step[DECODE bs={requests}]", begin, 100),
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
        assert (step.host_microseconds, step.launches) == (100, 2)
        # The gemm and the attention overlap by 10: that time is the earlier one's.
        assert step.parts == {
            "norms and rope": 10, "selection": 20, "linears": 30, "attention": 10, GAPS: 5,
        }  # fmt: skip
        assert sum(step.parts.values()) == step.microseconds
    summary = summarise([first, second], back_to_back=True)
    assert summary.microseconds == 75 and summary.between_microseconds == 450 - 75
    assert sum(summary.parts.values()) == pytest.approx(75)
    assert (summary.host_microseconds, summary.launches) == (100, 2)
    assert summary.launch_bound_share == pytest.approx(5 / 75)


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
    assert step.parts == {"linears": 35, "copies and elementwise": 5 + 10, GAPS: 10}
    assert step.kernels == {"aten::linear": 10, "aten::addmm": 25, "aten::copy_": 5, "aten::mul": 10}


def extend_step(begin: float, first: int, tokens: int = 512) -> list[dict]:
    """An extend step of an M3 server on a GPU: graphs between eager launches, two streams, gaps, a host that
    is slower than the GPU; our kernels, SGLang's and cuBLAS's."""
    launches = [
        event("cuda_runtime", "cudaMemcpyAsync", begin + 5, 5, first),
        event("cuda_driver", "cuLaunchKernelEx", begin + 100, 8, first + 1),
        event("cuda_runtime", "cudaGraphLaunch", begin + 300, 60, first + 2),
        event("cuda_runtime", "cudaLaunchKernelExC", begin + 500, 8, first + 3),
        event("cuda_runtime", "cudaStreamSynchronize", begin + 600, 300, first + 4),
    ]
    gpu = begin + 20
    return [
        event("user_annotation", f"step[EXTEND bs=1 toks={tokens}]", begin, 1000),
        # The same span on the GPU's time line, which is none of the host's.
        event("gpu_user_annotation", f"step[EXTEND bs=1 toks={tokens}]", gpu, 700),
        event("cpu_op", "aten::mm", begin + 90, 30),
        *launches,
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", gpu, 10, first),
        event("kernel", "_request_extent_kernel", gpu + 90, 20, first + 1),
        # One graph: its kernels carry its launch's correlation, on two streams.
        event("kernel", "nvjet_tst_192x128_64x5_2x1_v_bz_coopB_TNT", gpu + 310, 50, first + 2),
        event("kernel", "_score_kernel", gpu + 350, 30, first + 2),
        event("kernel", "_gemma_rmsnorm_kernel", gpu + 355, 10, first + 2),
        event("kernel", "attend_tiles", gpu + 385, 15, first + 2),
        event("kernel", "_fwd_kernel_ep_scatter_1", gpu + 400, 5, first + 2),
        event("kernel", "fused_moe_kernel", gpu + 505, 100, first + 3),
    ]


def test_an_extend_step_of_graphs_and_eager_launches_on_two_streams_adds_up() -> None:
    # Sampling runs between the steps and belongs to neither.
    between = [
        event("cuda_runtime", "cudaLaunchKernel", 1010, 5, 90),
        event("kernel", "void at::native::reduce_kernel<512, 1, ArgMaxOps>", 1020, 7, 90),
        event("kernel", "launched_before_the_trace_began", 30, 400, 7777),
        {"ph": "X", "cat": "kernel", "name": "without_arguments", "ts": 40, "dur": 3, "tid": 1},
        {"ph": "M", "name": "process_name", "args": {}},
        {"ph": "i", "name": "a moment", "ts": 4},
    ]
    first, second = steps([*extend_step(0, 1), *between, *extend_step(2000, 11)])
    for step in (first, second):
        assert (step.stage, step.requests, step.tokens) == ("EXTEND", 1, 512)
        assert step.microseconds == 605
        assert step.parts == {
            "copies and elementwise": 10,
            # _score_kernel overlaps the product by 10; the norm lies within both.
            "selection": 20 + 20,
            "linears": 50,
            "norms and rope": 0,
            "attention": 15,
            "MoE": 5 + 100,
            GAPS: 80 + 200 + 100,
            # Within the graph, from its last overlapping kernel on.
            GRAPH_GAPS: 5,
        }  # fmt: skip
        # The synchronisation launches nothing.
        assert (step.host_microseconds, step.launches) == (1000, 4)
    assert summarise([first, second], back_to_back=False).launch_bound_share == pytest.approx(380 / 605)


LAYER = (
    ("_gemma_fused_add_rmsnorm_kernel", "norms and rope"),
    ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT", "linears"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "linears"),
    ("void sglang::fused_gemma_qknorm_rope_kernel<sglang::FusedTrait<long, 128l, 64l>>", "norms and rope"),
    ("void (anonymous namespace)::store_kv_index_kernel<256l, 128l>", "cache and page tables"),
    ("_score_kernel", "selection"),
    ("_select_kernel", "selection"),
    ("attend_tiles", "attention"),
    ("merge_splits", "attention"),
    ("void topkGatingSigmoid<float, 4, 128>", "MoE"),
    ("fused_moe_kernel", "MoE"),
    ("Memset (Device)", "copies and elementwise"),
)


def test_a_step_of_sixty_layers_in_one_graph_adds_up() -> None:
    """720 kernels, of 2 us with 1 us between them, launched at once and long before they run."""
    events, repeats = [], 20
    for place in range(repeats):
        begin, first = 5000.0 * place, 2 * place
        events += [
            event("user_annotation", "step[DECODE bs=8]", begin, 400),
            event("cuda_runtime", "cudaGraphLaunch", begin + 300, 50, first),
        ]
        for number in range(60 * len(LAYER)):
            name, _ = LAYER[number % len(LAYER)]
            kind = "gpu_memset" if name.startswith("Memset") else "kernel"
            events.append(event(kind, name, begin + 2000 + 3 * number, 2, first))
    found = steps(events)
    assert len(found) == repeats
    summary = summarise(found, back_to_back=True)
    assert (summary.ran, summary.launches, summary.microseconds) == (720, 1, 720 * 3 - 1)
    assert summary.between_microseconds == 5000 - summary.microseconds and summary.between_kernels == {}
    for part in {part for _, part in LAYER}:
        kinds = sum(part == other for _, other in LAYER)
        assert summary.parts[part] == pytest.approx(60 * 2 * kinds), part
    assert summary.parts[GRAPH_GAPS] == pytest.approx(719)
    assert summary.launch_bound_share == 0 and OTHER not in summary.parts
    assert summary.kernels["attend_tiles"] == pytest.approx(120)


def test_what_runs_between_two_steps_is_counted_once_and_in_neither() -> None:
    between = [
        event("cuda_runtime", "cudaLaunchKernel", 120, 5, 90),
        event("cuda_runtime", "cudaMemcpyAsync", 130, 5, 91),
        # It begins beside the first step's last kernel, overlaps a copy, and ends before the second step.
        event("kernel", "argmax", 570, 25, 90),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 590, 15, 91),
        # One of another process's launches runs into the second step.
        event("kernel", "elsewhere", 940, 30, 7777),
    ]
    first, second = steps([*decode_step(0, 1), *decode_step(450, 11), *between])
    assert (first.end, second.begin) == (575, 950)
    assert first.between_microseconds == 375 and second.between_microseconds is None
    copy = "Memcpy DtoH (Device -> Pinned)"
    assert first.between_kernels == {"argmax": 20, copy: 10, "elsewhere": 10}
    assert first.microseconds == second.microseconds == 75 and sum(second.kernels.values()) == 70
    summary = summarise([first, second], back_to_back=True)
    assert summary.between_kernels == {"argmax": 20, copy: 10, "elsewhere": 10}
    assert summarise([first, second], back_to_back=False).between_microseconds is None


def test_steps_of_other_sizes_are_not_back_to_back() -> None:
    first, second = steps([*decode_step(0, 1, requests=7), *decode_step(450, 11)])
    assert first.between_microseconds is None and second.between_microseconds is None


def test_what_runs_beside_the_step_before_is_no_gap_of_the_next() -> None:
    """Copies for the next step, on a stream of their own, while this one computes."""
    early = [
        event("user_annotation", "step[DECODE bs=8]", 200, 100),
        event("cuda_runtime", "cudaMemcpyAsync", 210, 5, 21),
        event("cuda_runtime", "cudaGraphLaunch", 250, 5, 22),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 510, 4, 21),
        event("kernel", "attend_tiles", 580, 20, 22),
    ]
    first, second = steps([*decode_step(0, 1), *early])
    assert (first.begin, first.microseconds) == (500, 75)
    assert (second.begin, second.microseconds) == (575, 25)
    assert second.parts == {"copies and elementwise": 0, "attention": 20, GAPS: 5}
    assert sum(second.kernels.values()) == 20


def test_a_trace_is_read_gzipped_or_not(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": decode_step(0, 1)})
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(text.encode()))
    assert breakdown.read(tmp_path / "a.json") == breakdown.read(tmp_path / "b.json.gz") == decode_step(0, 1)


def test_half_a_trace_is_an_error_that_names_it(tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps({"traceEvents": decode_step(0, 1)}).encode())
    for name, content in {"cut.json.gz": whole[:-20], "text.json": b"{", "other.json": b"{}"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TraceError, match=f"{name} is no whole trace"):
            breakdown.read(tmp_path / name)


SPAN = event("user_annotation", "step[DECODE bs=8]", 0, 100)
CALL = event("cuda_runtime", "cudaLaunchKernel", 10, 5, 1)
LACKING = {
    "nothing": ([], r"no span 'step\[...\]'.*it holds \[\]"),
    "another span": ([event("user_annotation", "forward", 0, 100)], r"it holds \['forward'\]"),
    "nothing in the steps": ([SPAN], "neither launches nor operators"),
    "no kernels": ([SPAN, CALL], "1 CUDA calls and not one kernel: CUPTI recorded none"),
    "kernels of nobody": ([SPAN, CALL, event("kernel", "k", 20, 5, 9)], "none of the trace's 1 kernels"),
    "no correlation": (
        [SPAN, event("cuda_runtime", "cudaLaunchKernel", 10, 5), event("kernel", "k", 20, 5)],
        "or have no correlation ids",
    ),
}


@pytest.mark.parametrize(("events", "message"), LACKING.values(), ids=LACKING)
def test_a_trace_that_cannot_be_split_says_what_it_lacks(events: list[dict], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        steps(events)


def test_no_step_is_an_error() -> None:
    with pytest.raises(TraceError, match="no such step"):
        summarise([], back_to_back=False)


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


def test_our_kernels_are_in_the_part_of_their_operator() -> None:
    kernels = triton_kernels()
    expected = {name: part_of_file(file) for name, file in kernels.items()}
    assert len(kernels) > 10 and set(expected.values()) == set(OURS.values()), "an operator without a part"
    # By name alone many of them would be anything: `_sum_kernel`, `_down_kernel`.
    assert {name: part_of(name) for name in kernels} == expected
    assert set(OURS.values()) <= set(PART_NAMES) - {OTHER}


THEIRS = {
    "_decode_score_attn_kernel": "selection",
    "_flash_attn_fwd_with_block_score_kernel": "selection",
    "_topk_index_merge_kernel": "selection",
    "_gqa_share_sparse_fwd_kernel": "attention",
    "_gqa_share_sparse_decode_kernel_impl": "attention",
    "_merge_topk_attn_out_kernel": "attention",
    "_fwd_kernel": "attention",
    "_fwd_grouped_kernel_stage1": "attention",
    "_fwd_kernel_stage2": "attention",
    "create_flashinfer_kv_indices_triton": "attention",
    "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>": "attention",
    "void flashinfer::BatchPrefillWithPagedKVCacheKernel<KernelTraits>": "attention",
    "void flashinfer::sampling::TopPSamplingFromProbKernel<1024>": "embedding and sampling",
    "fused_moe_kernel": "MoE",
    "moe_align_block_size_kernel": "MoE",
    "void moe_fused_gate_kernel<__nv_bfloat16>": "MoE",
    "_swiglu_oai_kernel": "MoE",
    # What PyTorch's compiler makes of SGLang's SwiGLU-OAI.
    "triton_poi_fused_add_clamp_mul_sigmoid_split_0": "MoE",
    "_router_triton_kernel": "MoE",
    "void sglang::fused_gemma_qknorm_rope_kernel<sglang::FusedTrait<long, 128l, 64l>>": "norms and rope",
    "void sglang::tiny_n_gemm_kernel<sglang::GEMMTraitN<16u, 6144u, 1u, 32u, __nv_bfloat16>>": "linears",
    "void sglang::store_kvcache_kernel<256l, 256l, 32u, true, long>": "cache and page tables",
    "_fwd_kernel_ep_scatter_2": "MoE",
    "post_reorder_deepgemm_triton_kernel": "MoE",
    "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 6144u, 3072u, (deep_gemm::GemmType)2>": "MoE",
    "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 6144u, 3072u, (deep_gemm::GemmType)0>": "linears",
    "_sparse_qk_index_gemma_rmsnorm_rope_cache_kernel": "norms and rope",
    "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>": "norms and rope",
    "nvjet_tst_128x64_64x8_1x2_h_bz_coopA_TNT": "linears",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>": "linears",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>": "linears",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1": "linears",
    "_per_token_group_quant_8bit": "linears",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "collectives",
    "void sglang::cross_device_reduce_1stage<__nv_bfloat16, 8>": "collectives",
    "Memcpy DtoD (Device -> Device)": "copies and elementwise",
    "void at::native::vectorized_elementwise_kernel<4>": "copies and elementwise",
    "void (anonymous namespace)::minimax_decode_topk_block_kernel<int, true, TopKTrait>": "selection",
    "void (anonymous namespace)::minimax_decode_topk_page_table_kernel<int, true>": "selection",
    "_index_block_score_only_kernel": "selection",
    "_topk_index_partial_kernel": "selection",
    "_router_gemv_kernel": "MoE",
    "void align_single_token_kernel<8>": "MoE",
    "void topk_sum_kernel<__nv_bfloat16, 4>": "MoE",
    "void count_and_sort_expert_tokens_kernel<int>": "MoE",
    "void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, silu>": "MoE",
    "void deep_gemm::sm90_bf16_gemm_impl<(cute::UMMA::Major)0, 0u, 6144u>": "linears",
    "void deep_gemm::transpose_and_pack_fp32_into_ue8m0<128u, 64u>": "linears",
    "void flash::prepare_varlen_num_blocks_kernel<1, true>": "attention",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>>>": "attention",
    "void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<16>>>>": "attention",
    "_fused_decode_metadata_kernel": "attention",
    "_gemma_routing_post_topk_kernel": "other",
    # What it is called with is no attention's metadata.
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<4u>, 2>"
    "(at::native::(anonymous namespace)::CatArrInputTensorMetadata<int>)": "copies and elementwise",
    "void at_cuda_detail::cub::detail::scan::DeviceScanKernel<std::plus<int>>": "copies and elementwise",
    "_build_gluon_sparse_bt_prefill_kernel": "other",
    "alloc_extend_kernel": "cache and page tables",
    "write_req_to_token_pool_triton": "cache and page tables",
    "void flashinfer::AppendPagedKVCacheKernel<128, 8>": "cache and page tables",
    "void flashinfer::sampling::TopKRenormProbKernel<1024>": "embedding and sampling",
    "void at::native::(anonymous namespace)::vectorized_gather_kernel<16, long>": "embedding and sampling",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>": "embedding and sampling",
    "_lamport_style_one_shot_kernel": "collectives",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": "norms and rope",
    "triton_red_fused_add_1": "copies and elementwise",
    "Memset (Device)": "copies and elementwise",
    "aten::_softmax": "attention",
    "aten::where": "copies and elementwise",
    "a_kernel_nobody_knows": "other",
}


@pytest.mark.parametrize(
    ("kernel", "head"),
    [
        ("_score_kernel", "_score_kernel"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        ("void a::k<1>(int const*, b<2>)", "a::k<1>"),
        ("void a::(anonymous namespace)::k<(c::Kind)2, b<f()::g>>((anonymous namespace)::p<q>)",
         "a::(anonymous namespace)::k<(c::Kind)2, b<f()::g>>"),
    ],
)  # fmt: skip
def test_a_kernel_s_parameters_are_no_part_of_its_name(kernel: str, head: str) -> None:
    assert without_parameters(kernel) == head


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("mxfp8_experts_few", "MoE"),
        ("mxfp8_dequantize", "linears"),
        ("attend_tiles", "attention"),
        ("planet", None),
    ],
)
def test_a_file_belongs_where_the_longest_beginning_says(file: str, part: str | None) -> None:
    assert part_of_file(file) == part


@pytest.mark.parametrize(("kernel", "part"), THEIRS.items())
def test_sglang_s_kernels_are_in_the_part_of_their_work(kernel: str, part: str) -> None:
    assert part_of(kernel) == part
