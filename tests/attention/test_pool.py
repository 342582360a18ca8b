"""The pool moves tokens whole, and index keys have the dtype that the setting says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_m3.attention import pool
from tests.kernels.sm90 import REAL

LAYERS = (0, 1, 2)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not REAL, reason="needs an sm90 GPU"))]


@pytest.fixture(params=DEVICES)
def tiny_pool(request: pytest.FixtureRequest) -> pool.M3KVPool:
    made = pool.M3KVPool(
        size=256,
        page_size=128,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=8,
        idx_head_dim=8,
        dense_layer_ids=[0],
        sparse_layer_ids=[1, 2],
        device=request.param,
        disable_value_sparse_layer_ids=[1, 2],
        start_layer=0,
        end_layer=3,
    )
    for number, buffer in enumerate(made._buffers()):
        slots = torch.arange(buffer.shape[0], device=request.param)[:, None, None]
        buffer.copy_((slots + 1000 * number).expand_as(buffer).to(buffer.dtype))
    return made


def test_moving_tokens_moves_keys_values_and_index_keys_of_every_layer(tiny_pool: pool.M3KVPool) -> None:
    device = tiny_pool.get_key_buffer(0).device
    source, target = (torch.tensor(slots, device=device) for slots in ([131, 7, 250, 9], [130, 7, 132, 8]))
    everything = {
        **{("k", layer): tiny_pool.get_key_buffer(layer) for layer in LAYERS},
        **{("v", layer): tiny_pool.get_value_buffer(layer) for layer in LAYERS},
        **{("index", layer): tiny_pool.get_index_k_buffer(layer) for layer in (1, 2)},
    }
    before = {name: buffer.clone() for name, buffer in everything.items()}
    tiny_pool.move_kv_cache(target, source)
    for name, buffer in everything.items():
        want = before[name].clone()
        want[target] = before[name][source]
        assert not torch.equal(want, before[name])
        assert torch.equal(buffer, want), name


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    ("setting", "quantization", "want"),
    [
        (None, None, torch.bfloat16),
        ("fp8_e4m3", None, torch.float8_e4m3fn),
        ("bfloat16", "m3_mxfp8", torch.bfloat16),
        (None, "modelopt_mixed", "SGLang's"),
    ],
)
def test_index_keys_follow_the_setting_and_not_the_dtype_of_keys_and_values(
    monkeypatch: pytest.MonkeyPatch,
    setting: str | None,
    quantization: str | None,
    want: torch.dtype | str,
    kv_dtype: torch.dtype,
) -> None:
    if setting is not None:
        monkeypatch.setenv("SGLANG_M3_INDEX_DTYPE", setting)
    monkeypatch.setattr(pool, "get_server_args", lambda: SimpleNamespace(quantization=quantization))
    monkeypatch.setattr(pool, "resolving_view", lambda args: args)
    got = pool.around_index_dtype(
        lambda **_: "SGLang's", fp8_attn_gemm=False, kv_cache_dtype=kv_dtype, model_dtype=torch.bfloat16
    )
    assert got == want
