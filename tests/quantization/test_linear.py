"""What linear layers do besides loading: which kernels are compiled before a request needs them."""

from __future__ import annotations

from tests.kernels import sm90  # noqa: F401 (decides how kernels are defined)

import pytest  # isort: skip
import torch  # isort: skip
from m3_kernels.triton.sm90_mxfp8_linear import TOKENS_OF_EVERY_KERNEL  # isort: skip
from sglang_m3.quantization import linear  # isort: skip


def test_a_shapes_kernels_are_compiled_once_and_never_inside_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, ...]] = []
    capturing = True
    monkeypatch.setattr(linear, "_compiled", set())
    monkeypatch.setattr(linear, "mxfp8_linear", lambda x, weight, scale: ran.append((*x.shape, len(weight))))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    weight = torch.empty(256, 64, dtype=torch.float8_e4m3fn)
    scale = torch.empty(256, 2, dtype=torch.uint8)
    linear.compile_for_all_steps(weight, scale, torch.bfloat16)
    assert not ran
    capturing = False
    for given in (weight, weight.clone(), weight[:128]):
        linear.compile_for_all_steps(given, scale[: len(given)], torch.bfloat16)
    assert ran == [(tokens, 64, rows) for rows in (256, 128) for tokens in TOKENS_OF_EVERY_KERNEL]
