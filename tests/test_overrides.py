"""Server arguments for M3: what is set, what is refused, and what to do instead."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.arg_groups import model_override_base
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig

from sglang_m3 import hardware, overrides
from sglang_m3.tiny import TinyConfig, build
from sglang_m3.tiny.config import model_config

DEFAULTS = {
    "model_path": "MiniMaxAI/MiniMax-M3",
    "load_format": "auto",
    "page_size": None,
    "chunked_prefill_size": 8192,
    "quantization": None,
    "speculative_algorithm": None,
    "speculative_ngram_max_bfs_breadth": 10,
    "_quantization_explicitly_unset": False,
    **{name: values[0] for name, values in overrides.NOT_YET.items()},
    "enable_dynamic_chunking": False,
    "cuda_graph_config": CudaGraphConfig(prefill=PhaseConfig(backend="breakable")),
    "dtype": "auto",
    "attention_backend": None,
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "kv_cache_dtype": "auto",
    "tp_size": 1,
    "pp_size": 1,
    "ep_size": 1,
    "dp_size": 1,
    "moe_runner_backend": "auto",
    "moe_a2a_backend": "none",
}


def prefill_graphs(backend: str = "breakable", **sizes: Any) -> dict[str, Any]:
    return {"cuda_graph_config": CudaGraphConfig(prefill=PhaseConfig(backend, **sizes))}


def config(**sparse: Any) -> SimpleNamespace:
    values = model_config(TinyConfig())
    text = values["text_config"]
    text["sparse_attention_config"] |= sparse
    return SimpleNamespace(**values | {"text_config": SimpleNamespace(**text)})


def provide(hf_config: Any = None, **flags: Any) -> dict[str, Any]:
    return overrides.provide(SimpleNamespace(**DEFAULTS | flags), hf_config or config())


@pytest.fixture(params=("cpu", "sm90"))
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(hardware, "target", lambda: request.param)
    for name in ("TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS", "SGLANG_OPT_USE_BF16_ROUTER_GEMM"):
        monkeypatch.setenv(name, "0")
    return request.param


def test_page_size_128_is_set_without_the_flag_and_accepted_with_it(target: str) -> None:
    assert provide()["page_size"] == 128
    assert provide(page_size=128)["page_size"] == 128


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"page_size": 64}, r"--page-size 64: .*pass 128"),
        ({"page_size": 1}, r"--page-size 1: "),
        ({"page_size": 256}, r"--page-size 256: "),
        ({"chunked_prefill_size": 1000}, r"--chunked-prefill-size 1000 .*pass 896"),
        ({"quantization": "fp8"}, r"fp8 of MiniMax-M3 is not supported .* without --quantization"),
        (
            {"quantization": "mxfp8", "moe_runner_backend": "flashinfer_trtllm"},
            r"--moe-runner-backend flashinfer_trtllm .*leave the flag out",
        ),
        ({"quantization": "mxfp8", "moe_a2a_backend": "deepep"}, r"--moe-a2a-backend deepep "),
        ({"speculative_algorithm": "EAGLE3"}, r"--speculative-algorithm EAGLE3 .*leave the flag out"),
        ({"enable_hisparse": True}, r"--enable-hisparse .*leave the flag out"),
        ({"enable_two_batch_overlap": True}, r"--enable-two-batch-overlap .*leave the flag out"),
        ({"enable_lora": True}, r"--enable-lora .*leave the flag out"),
        ({"lora_paths": ["a=b"]}, r"--lora-paths .*leave the flag out"),
        ({"enable_dp_attention": True}, r"--enable-dp-attention .*leave the flag out"),
        ({"tokenizer_worker_num": 2}, r"--tokenizer-worker-num 2 .*leave the flag out"),
        ({"moe_a2a_backend": "deepep"}, r"--moe-a2a-backend deepep .*leave the flag out"),
        ({"attn_cp_size": 2}, r"--attn-cp-size 2 .*leave the flag out"),
        ({"tp_size": 2, "pp_size": 2}, r"--tp-size 2 with --pp-size 2 has not been tried .*use one of them"),
    ],
    ids=str,
)
def test_flags_that_cannot_work_are_refused_by_name(target: str, flags: dict, message: str) -> None:
    with pytest.raises(overrides.UnsupportedError, match=message):
        provide(**flags)


@pytest.mark.parametrize(
    ("sparse", "message"),
    [
        ({"sparse_block_size": 64}, "sparse_block_size is 64"),
        ({"sparse_score_type": "lse"}, "sparse_score_type is 'lse'"),
        ({"sparse_disable_index_value": [0] * 5}, "index values are not supported"),
        ({"sparse_init_block": 4}, "do not fit into sparse_topk_blocks"),
        ({"sparse_num_index_heads": 8}, "sparse_num_index_heads is 8, which must equal"),
        ({"sparse_index_dim": 64}, "sparse_index_dim is 64, which must equal"),
    ],
    ids=str,
)
def test_checkpoints_that_cannot_work_are_refused_by_field(target: str, sparse: dict, message: str) -> None:
    with pytest.raises(overrides.UnsupportedError, match=message):
        provide(config(**sparse))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"attention_backend": "flashinfer"},
            r"--attention-backend flashinfer is not supported without",
        ),
        ({"decode_attention_backend": "fa3"}, r"--decode-attention-backend fa3 is not supported without"),
        ({"kv_cache_dtype": "fp8_e4m3"}, r"--kv-cache-dtype fp8_e4m3"),
        ({"speculative_algorithm": "NGRAM"}, r"--speculative-algorithm NGRAM"),
        ({"dp_size": 2}, r"--dp-size 2"),
    ],
    ids=str,
)
def test_what_needs_a_gpu_is_refused_without_one(
    monkeypatch: pytest.MonkeyPatch, flags: dict, message: str
) -> None:
    monkeypatch.setattr(hardware, "target", lambda: "cpu")
    with pytest.raises(overrides.UnsupportedError, match=message):
        provide(**flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"enable_dynamic_chunking": True}, r"--enable-dynamic-chunking True .*on Hopper"),
        ({"kv_cache_dtype": "fp8_e5m2"}, r"--kv-cache-dtype fp8_e5m2 .*on Hopper"),
        (
            {"speculative_algorithm": "NGRAM"},
            r"breadth 10: .*pass --speculative-ngram-max-bfs-breadth 1",
        ),
        ({"dtype": "float32"}, r"--dtype float32 .*on Hopper"),
        ({"chunked_prefill_size": -1}, r"--chunked-prefill-size -1: .*pass 8192"),
        (prefill_graphs(backend="full"), r"--cuda-graph-backend-prefill full"),
        (prefill_graphs(max_bs=16384), r"16384 tokens .*pass --cuda-graph-max-bs-prefill 8192"),
        (prefill_graphs(bs=[512, 8320]), r"8320 tokens .*--cuda-graph-bs-prefill"),
    ],
    ids=str,
)
def test_what_the_kernels_do_not_do_is_refused_on_hopper(
    monkeypatch: pytest.MonkeyPatch, flags: dict, message: str
) -> None:
    monkeypatch.setattr(hardware, "target", lambda: "sm90")
    with pytest.raises(overrides.UnsupportedError, match=message):
        provide(**flags)


@pytest.mark.parametrize(
    "flags",
    [
        {"kv_cache_dtype": "fp8_e4m3"},
        {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1},
        prefill_graphs(max_bs=8192, bs=[512, 8192]),
        prefill_graphs(bs=[512, 8320]) | {"chunked_prefill_size": 16384},
        prefill_graphs("disabled", max_bs=16384),
    ],
    ids=str,
)
def test_what_the_kernels_do_is_served_on_hopper(monkeypatch: pytest.MonkeyPatch, flags: dict) -> None:
    monkeypatch.setattr(hardware, "target", lambda: "sm90")
    assert provide(**flags) == {"page_size": 128}


def test_another_dtype_of_index_keys_is_refused_without_a_gpu(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_M3_INDEX_DTYPE", "fp8_e4m3")
    if target == "sm90":
        assert provide()["page_size"] == 128
        return
    with pytest.raises(overrides.UnsupportedError, match="SGLANG_M3_INDEX_DTYPE"):
        provide()


def test_recording_under_cuda_graphs_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "target", lambda: "sm90")
    monkeypatch.setenv("SGLANG_M3_RECORD_BLOCKS", str(tmp_path))
    off = PhaseConfig("disabled")
    for graphs in ({}, {"cuda_graph_config": CudaGraphConfig(decode=off, prefill=PhaseConfig("breakable"))}):
        with pytest.raises(overrides.UnsupportedError, match="--disable-cuda-graph"):
            provide(**graphs)
    assert provide(cuda_graph_config=CudaGraphConfig(decode=off, prefill=off))["page_size"] == 128


def test_the_environment_of_a_server_without_a_gpu_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "target", lambda: "cpu")
    for name in ("TORCHDYNAMO_DISABLE", "SGLANG_OPT_USE_BF16_ROUTER_GEMM"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    provide()
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ
    assert os.environ["SGLANG_OPT_USE_BF16_ROUTER_GEMM"].lower() in ("0", "false")


@pytest.mark.parametrize(("ranks", "cores"), [(2, "0,1|2,3"), (3, "0|1|2"), (6, "0|1|2|3|0|1")])
def test_ranks_without_a_gpu_share_the_cores(monkeypatch: pytest.MonkeyPatch, ranks: int, cores: str) -> None:
    monkeypatch.setattr(hardware, "target", lambda: "cpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "")
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND")
    provide(tp_size=ranks)
    assert os.environ["SGLANG_CPU_OMP_THREADS_BIND"] == cores


def resolve(checkpoint: Path, **flags: Any) -> Any:
    """SGLang's whole resolution of server arguments for a checkpoint on disk."""
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path=str(checkpoint), skip_tokenizer_init=True, **flags)
    args.resolve_once()
    return resolving_view(args)


@pytest.fixture
def checkpoint(tmp_path: Path, target: str) -> Path:
    return build(tmp_path / "tiny")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = {name: list(known) for name, known in model_override_base._MODEL_OVERRIDE_FNS.items()}
    monkeypatch.setattr(model_override_base, "_MODEL_OVERRIDE_FNS", copied)
    overrides.register()


@pytest.mark.parametrize("target", ["cpu"], indirect=True)
@pytest.mark.usefixtures("registered")
def test_sglangs_own_resolution_ends_with_page_size_128_or_the_refusal(checkpoint: Path) -> None:
    resolved = resolve(checkpoint)
    assert (resolved.page_size, resolved.attention_backend) == (128, "torch_native")
    with pytest.raises(overrides.UnsupportedError, match="--page-size 64"):
        resolve(checkpoint, page_size=64)


@pytest.mark.parametrize("present", [True, False])
def test_fast_mxfp8_without_deep_gemm_is_refused_on_hopper(
    monkeypatch: pytest.MonkeyPatch, present: bool
) -> None:
    monkeypatch.setattr(hardware, "target", lambda: "sm90")
    monkeypatch.setattr("sglang.srt.layers.deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM", present)
    monkeypatch.setenv("SGLANG_M3_MXFP8", "fast")
    if present:
        assert provide(quantization="mxfp8")["quantization"] == "m3_mxfp8"
        return
    with pytest.raises(overrides.UnsupportedError, match=r"needs DeepGEMM .*use exact"):
        provide(quantization="mxfp8")


@pytest.mark.parametrize("runner", ["auto", "deep_gemm", "triton"])
@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("target", ["cpu"], indirect=True)
@pytest.mark.usefixtures("registered")
def test_mxfp8_of_flag_or_checkpoint_becomes_the_plugins_with_every_moe_runner(
    checkpoint: Path, declared: bool, runner: str
) -> None:
    path = checkpoint / "config.json"
    config = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "activation_scheme": "dynamic"}
    if declared:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    flags = {} if declared else {"quantization": "mxfp8"}
    resolved = resolve(checkpoint, moe_runner_backend=runner, **flags)
    assert (resolved.quantization, resolved.moe_runner_backend) == ("m3_mxfp8", runner)


@pytest.mark.parametrize("quantization", overrides.SERVED_BY_SGLANG)
def test_quantisations_that_sglang_serves_on_hopper_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    monkeypatch.setattr(hardware, "target", lambda: "sm90")
    assert provide(quantization=quantization, page_size=1) == {}
    monkeypatch.setattr(hardware, "target", lambda: "cpu")
    with pytest.raises(overrides.UnsupportedError, match=quantization):
        provide(quantization=quantization)


@pytest.mark.parametrize("target", ["sm90"], indirect=True)
def test_weights_in_another_format_are_not_taken_for_mxfp8(target: str) -> None:
    declared = config()
    declared.quantization_config = {
        "quant_method": "mxfp8",
        "moe_quant_algo": "NVFP4",
        "moe_quant_format": "nvfp4-pack-quantized",
    }
    assert provide(declared) == {}
    with pytest.raises(overrides.UnsupportedError, match=r"--quantization mxfp8: .*minimax_m3_nvfp4; leave"):
        provide(declared, quantization="mxfp8")


def test_other_hardware_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "target", lambda: None)
    assert provide(page_size=64, quantization="mxfp8") == {}
