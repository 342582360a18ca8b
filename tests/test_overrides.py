"""Server arguments for M3: what is set, what is refused, and what to do instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_m3 import hardware, overrides
from sglang_m3.tiny import TinyConfig
from sglang_m3.tiny.config import model_config

DEFAULTS = {
    "page_size": None,
    "chunked_prefill_size": 8192,
    "quantization": None,
    "speculative_algorithm": None,
    "enable_hisparse": False,
    "attention_backend": None,
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "kv_cache_dtype": "auto",
    "tp_size": 1,
    "pp_size": 1,
    "ep_size": 1,
}


def config(**sparse: Any) -> SimpleNamespace:
    values = model_config(TinyConfig())
    text = values["text_config"]
    text["sparse_attention_config"] |= sparse
    return SimpleNamespace(**values | {"text_config": SimpleNamespace(**text)})


def provide(target: str, hf_config: Any = None, **flags: Any) -> dict[str, Any]:
    return overrides.provide(SimpleNamespace(**DEFAULTS | flags), hf_config or config())


@pytest.fixture(params=("cpu", "sm90"))
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(hardware, "target", lambda: request.param)
    for name in ("TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS", "SGLANG_OPT_USE_BF16_ROUTER_GEMM"):
        monkeypatch.setenv(name, "0")
    return request.param


def test_page_size_128_is_set_without_the_flag_and_accepted_with_it(target: str) -> None:
    assert provide(target)["page_size"] == 128
    assert provide(target, page_size=128)["page_size"] == 128


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"page_size": 64}, r"--page-size 64: .*pass 128"),
        ({"page_size": 1}, r"--page-size 1: "),
        ({"page_size": 256}, r"--page-size 256: "),
        ({"chunked_prefill_size": 1000}, r"--chunked-prefill-size 1000 .*pass 896"),
        ({"quantization": "mxfp8"}, r"mxfp8 is not supported .* without --quantization"),
        ({"speculative_algorithm": "EAGLE3"}, r"--speculative-algorithm EAGLE3 .*leave the flag out"),
        ({"enable_hisparse": True}, r"--enable-hisparse .*leave the flag out"),
    ],
    ids=str,
)
def test_flags_that_cannot_work_are_refused_by_name(target: str, flags: dict, message: str) -> None:
    with pytest.raises(overrides.UnsupportedError, match=message):
        provide(target, **flags)


@pytest.mark.parametrize(
    ("sparse", "message"),
    [
        ({"sparse_block_size": 64}, "sparse_block_size is 64"),
        ({"sparse_score_type": "lse"}, "sparse_score_type is 'lse'"),
        ({"sparse_disable_index_value": [0] * 5}, "index values are not supported"),
        ({"sparse_init_block": 4}, "do not fit into sparse_topk_blocks"),
    ],
    ids=str,
)
def test_checkpoints_that_cannot_work_are_refused_by_field(target: str, sparse: dict, message: str) -> None:
    with pytest.raises(overrides.UnsupportedError, match=message):
        provide(target, config(**sparse))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"attention_backend": "flashinfer"}, r"--attention-backend flashinfer needs a GPU"),
        ({"decode_attention_backend": "fa3"}, r"--decode-attention-backend fa3 needs a GPU"),
        ({"kv_cache_dtype": "fp8_e4m3"}, r"--kv-cache-dtype fp8_e4m3"),
        ({"tp_size": 2}, r"--tp-size"),
    ],
    ids=str,
)
def test_what_needs_a_gpu_is_refused_without_one(
    monkeypatch: pytest.MonkeyPatch, flags: dict, message: str
) -> None:
    monkeypatch.setattr(hardware, "target", lambda: "cpu")
    with pytest.raises(overrides.UnsupportedError, match=message):
        provide("cpu", **flags)


@pytest.mark.parametrize("quantization", overrides.SERVED_BY_SGLANG)
def test_quantisations_that_sglang_serves_on_hopper_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    monkeypatch.setattr(hardware, "target", lambda: "sm90")
    assert provide("sm90", quantization=quantization, page_size=1) == {}
    monkeypatch.setattr(hardware, "target", lambda: "cpu")
    with pytest.raises(overrides.UnsupportedError, match=quantization):
        provide("cpu", quantization=quantization)


def test_other_hardware_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "target", lambda: None)
    assert provide("none", page_size=64, quantization="mxfp8") == {}
