"""Dense layers share pages while decoding, and are the chosen dense backend's otherwise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from m3_kernels.rows import Rows
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import nn

from sglang_m3.attention.backend import M3SparseBackend
from sglang_m3.attention.hybrid import MOST_WHOLE_ROWS, M3HybridBackend
from sglang_m3.attention.pool import M3KVPool
from sglang_m3.attention.step import Step
from sglang_m3.attention.workspace import Workspaces
from tests.kernels.sm90 import REAL

DENSE_LAYER, SPARSE_LAYER = 0, 1


class Recording:
    """Stands for a backend: writes down what was asked of it."""

    def __init__(self, name: str, calls: list[tuple[str, str]]) -> None:
        self._name, self._calls = name, calls
        self.kv_index_translator = self.prefill_graph_steps = None

    def __getattr__(self, method: str):
        if method.startswith("extend_dummy"):
            return False
        return lambda *args, **kwargs: self._calls.append((self._name, method))


class RecordingTriton(Recording, TritonAttnBackend):
    """Stands for SGLang's Triton backend."""


def hybrid_of(dense: type[Recording], calls: list[tuple[str, str]]) -> M3HybridBackend:
    return M3HybridBackend(dense("dense", calls), Recording("sparse", calls), [SPARSE_LAYER])


@pytest.mark.parametrize(
    ("mode", "dense", "dense_layers"),
    [
        (ForwardMode.DECODE, Recording, "sparse"),
        (ForwardMode.TARGET_VERIFY, Recording, "sparse"),
        (ForwardMode.EXTEND, Recording, "dense"),
        (ForwardMode.MIXED, Recording, "dense"),
        (ForwardMode.EXTEND, RecordingTriton, "sparse"),
        (ForwardMode.MIXED, RecordingTriton, "sparse"),
    ],
)
def test_a_dense_layers_backend_prepares_exactly_the_steps_that_it_serves(
    mode: ForwardMode, dense: type[Recording], dense_layers: str
) -> None:
    calls: list[tuple[str, str]] = []
    hybrid = hybrid_of(dense, calls)
    batch = SimpleNamespace(forward_mode=mode, extend_seq_lens_cpu=None)
    for prepare in (
        hybrid.init_forward_metadata,
        hybrid.init_forward_metadata_out_graph,
        hybrid.init_forward_metadata_in_graph,
    ):
        calls.clear()
        prepare(batch)
        assert {name for name, _ in calls} == {"sparse", dense_layers}, calls
    calls.clear()
    hybrid.forward(None, None, None, SimpleNamespace(layer_id=SPARSE_LAYER), batch)
    hybrid.forward(None, None, None, SimpleNamespace(layer_id=DENSE_LAYER), batch)
    served = "attend_to_all" if dense_layers == "sparse" else "forward"
    assert calls == [("sparse", "forward"), (dense_layers, served)]


@pytest.mark.parametrize("dense", [Recording, RecordingTriton])
def test_prefill_graphs_hold_dense_layers_where_they_are_short_or_the_plugins(dense: type[Recording]) -> None:
    calls: list[tuple[str, object]] = []
    hybrid = hybrid_of(dense, calls)
    model = nn.ModuleList(nn.Sequential(RadixAttention(2, 16, 1.0, 1, layer)) for layer in (0, 1, 2))
    hybrid.capture_whole(model)

    def breaks() -> list[int]:
        return [layer[0].layer_id for layer in model if layer[0].use_prefill_attention_wrapper]

    assert breaks() == ([0, 2] if dense is Recording else [])

    def step_of(batch: SimpleNamespace, rows: int) -> Step:
        calls.append(("sparse", rows))
        return steps[rows]

    hybrid.sparse.refill_prefill_graph_step = step_of
    sizes = (MOST_WHOLE_ROWS + 1, MOST_WHOLE_ROWS, 7)
    steps = {
        rows: Step(torch.zeros(1, 1), Rows(torch.zeros(rows), torch.zeros(rows)), SimpleNamespace())
        for rows in sizes
    }
    for rows in sizes:
        calls.clear()
        by_dense = dense is Recording and rows > MOST_WHOLE_ROWS
        batch = SimpleNamespace(
            input_ids=torch.zeros(rows), forward_mode=ForwardMode.EXTEND, extend_seq_lens_cpu=None
        )
        assert hybrid.init_forward_metadata_for_breakable_cuda_graph_capture(batch) is steps[rows]
        assert breaks() == ([0, 2] if by_dense else []), rows
        hybrid.forward(None, None, None, SimpleNamespace(layer_id=DENSE_LAYER), batch)
        prepared = [("dense", "init_forward_metadata")] if by_dense else []
        served = ("dense", "forward") if by_dense else ("sparse", "attend_to_all")
        assert calls == [*prepared, ("sparse", rows), served], rows
    # In any order, between eager steps, a replay serves the dense layers as its graph was captured.
    for rows in reversed(sizes):
        calls.clear()
        by_dense = dense is Recording and rows > MOST_WHOLE_ROWS
        # A replayed batch has fewer tokens than its graph.
        batch = SimpleNamespace(
            input_ids=torch.zeros(5), forward_mode=ForwardMode.MIXED, extend_seq_lens_cpu=None
        )
        hybrid.prepare_forward_metadata_for_breakable_cuda_graph_replay(
            steps[rows], batch, static_forward_batch=None
        )
        if by_dense:  # the break
            hybrid.forward(None, None, None, SimpleNamespace(layer_id=DENSE_LAYER), batch)
        done = [("dense", "init_forward_metadata"), ("sparse", rows), ("dense", "forward")]
        assert calls == (done if by_dense else [("sparse", rows)]), rows
        calls.clear()
        hybrid.init_forward_metadata(batch)
        hybrid.forward(None, None, None, SimpleNamespace(layer_id=DENSE_LAYER), batch)
        assert calls[-1] == (("dense", "forward") if dense is Recording else ("sparse", "attend_to_all"))


@pytest.mark.parametrize("prefill", [Recording, RecordingTriton])
def test_of_two_dense_backends_that_for_prefill_decides(prefill: type[Recording]) -> None:
    pair = object.__new__(HybridAttnBackend)
    pair.prefill_backend, pair.kv_index_translator = prefill("prefill", []), None
    other = RecordingTriton if prefill is Recording else Recording
    pair.decode_backend = other("decode", [])
    hybrid = M3HybridBackend(pair, Recording("sparse", []), [SPARSE_LAYER])
    layer = RadixAttention(2, 16, 1.0, 1, DENSE_LAYER)
    hybrid.capture_whole(layer)
    assert layer.use_prefill_attention_wrapper == (prefill is Recording)


@pytest.mark.skipif(REAL, reason="SGLang's pool on the CPU needs its build without CUDA")
def test_a_dense_layer_attends_to_every_token_of_its_request() -> None:
    heads, kv_heads, dim = 6, 2, 16
    torch.manual_seed(3)
    pool = M3KVPool(
        size=512,
        page_size=128,
        dtype=torch.float32,
        head_num=kv_heads,
        head_dim=dim,
        idx_head_dim=dim,
        dense_layer_ids=[DENSE_LAYER],
        sparse_layer_ids=[SPARSE_LAYER],
        device="cpu",
        disable_value_sparse_layer_ids=[SPARSE_LAYER],
        start_layer=0,
        end_layer=2,
    )
    for buffer in pool._buffers():
        buffer.normal_()
    # Two requests share page 3; their next tokens lie on pages of their own.
    page_table = torch.tensor([[3, 1], [3, 2]], dtype=torch.int32)
    position = torch.tensor([131, 128], dtype=torch.int32)
    backend = object.__new__(M3SparseBackend)
    backend.token_to_kv_pool = pool
    backend._workspaces = Workspaces(*(torch.empty(0, dtype=torch.uint8) for _ in range(3)))
    backend._step = SimpleNamespace(
        page_table=page_table, rows=Rows(torch.tensor([0, 1], dtype=torch.int32), position)
    )
    layer = SimpleNamespace(
        layer_id=DENSE_LAYER, head_dim=dim, scaling=0.25, k_scale_float=None, v_scale_float=None
    )
    slots = torch.tensor([1 * 128 + 3, 2 * 128 + 0])
    q, k, v = torch.randn(2, heads * dim), torch.randn(2, kv_heads, dim), torch.randn(2, kv_heads, dim)
    got = backend.attend_to_all(q, k, v, layer, SimpleNamespace(out_cache_loc=slots))
    keys, values = pool.get_kv_buffer(DENSE_LAYER)
    assert torch.equal(keys[slots], k) and torch.equal(values[slots], v)
    for row in range(2):
        used = torch.cat(
            [torch.arange(3 * 128, 4 * 128), torch.arange(int(slots[row]) // 128 * 128, int(slots[row]) + 1)]
        )
        for head in range(heads):
            weights = (keys[used, head // 3] @ q[row].view(heads, dim)[head] * 0.25).softmax(0)
            want = weights @ values[used, head // 3]
            torch.testing.assert_close(got[row].view(heads, dim)[head], want, atol=1e-5, rtol=1e-5)
