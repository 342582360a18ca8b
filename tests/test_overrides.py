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

from sglang_m3 import hardware, overrides
from sglang_m3.tiny import TinyConfig, build
from sglang_m3.tiny.config import model_config

DEFAULTS = {
    "page_size": None,
    "chunked_prefill_size": 8192,
    "quantization": None,
    "speculative_algorithm": None,
    "_quantization_explicitly_unset": False,
    "enable_hisparse": False,
    "enable_two_batch_overlap": False,
    "enable_pdmux": False,
    "cuda_graph_backend_prefill": None,
    "disable_cuda_graph": False,
    "dtype": "auto",
    "attention_backend": None,
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "kv_cache_dtype": "auto",
    "tp_size": 1,
    "pp_size": 1,
    "ep_size": 1,
    "dp_size": 1,
}


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
        ({"quantization": "mxfp8"}, r"mxfp8 of MiniMax-M3 is not supported .* without --quantization"),
        ({"speculative_algorithm": "EAGLE3"}, r"--speculative-algorithm EAGLE3 .*leave the flag out"),
        ({"enable_hisparse": True}, r"--enable-hisparse .*leave the flag out"),
        ({"enable_two_batch_overlap": True}, r"--enable-two-batch-overlap .*leave the flag out"),
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
        ({"tp_size": 2}, r"--tp-size 2"),
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
        ({"kv_cache_dtype": "fp8_e4m3"}, r"--kv-cache-dtype fp8_e4m3 .*on Hopper"),
        ({"dtype": "float32"}, r"--dtype float32 .*on Hopper"),
        ({"chunked_prefill_size": -1}, r"--chunked-prefill-size -1: .*pass 8192"),
        ({"cuda_graph_backend_prefill": "full"}, r"--cuda-graph-backend-prefill full"),
    ],
    ids=str,
)
def test_what_the_kernels_do_not_do_is_refused_on_hopper(
    monkeypatch: pytest.MonkeyPatch, flags: dict, message: str
) -> None:
    monkeypatch.setattr(hardware, "target", lambda: "sm90")
    with pytest.raises(overrides.UnsupportedError, match=message):
        provide(**flags)


def test_recording_under_cuda_graphs_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "target", lambda: "sm90")
    monkeypatch.setenv("SGLANG_M3_RECORD_BLOCKS", str(tmp_path))
    with pytest.raises(overrides.UnsupportedError, match="--disable-cuda-graph"):
        provide()
    assert provide(disable_cuda_graph=True)["page_size"] == 128


def test_the_environment_of_a_server_without_a_gpu_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "target", lambda: "cpu")
    for name in ("TORCHDYNAMO_DISABLE", "SGLANG_OPT_USE_BF16_ROUTER_GEMM"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    provide()
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert os.environ["SGLANG_OPT_USE_BF16_ROUTER_GEMM"].lower() in ("0", "false")


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


@pytest.mark.parametrize("target", ["cpu"], indirect=True)
@pytest.mark.usefixtures("registered")
def test_a_quantisation_that_only_the_checkpoint_declares_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    declared = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "activation_scheme": "dynamic"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": declared}))
    with pytest.raises(overrides.UnsupportedError, match="mxfp8"):
        resolve(checkpoint)


@pytest.mark.parametrize("quantization", overrides.SERVED_BY_SGLANG)
def test_quantisations_that_sglang_serves_on_hopper_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    monkeypatch.setattr(hardware, "target", lambda: "sm90")
    assert provide(quantization=quantization, page_size=1) == {}
    monkeypatch.setattr(hardware, "target", lambda: "cpu")
    with pytest.raises(overrides.UnsupportedError, match=quantization):
        provide(quantization=quantization)


def test_other_hardware_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "target", lambda: None)
    assert provide(page_size=64, quantization="mxfp8") == {}
