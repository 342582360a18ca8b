"""Two projections that lie together are one product, and stay two parameters for whoever loads them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from m3_kernels.reference.quantize_mxfp8 import quantize_mxfp8
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import nn

from sglang_m3.models.joined import joined, lay_together, project
from sglang_m3.quantization.config import M3MxFp8Config
from sglang_m3.quantization.linear import M3MxFp8LinearMethod

INPUTS, ROWS = 24, (40, 9)


class Layer(nn.Module):
    """What `joined` uses of SGLang's linear layers."""

    def __init__(self, rows: int, method: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, INPUTS), requires_grad=False)
        self.bias, self.quant_method = None, method

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return inputs @ self.weight.T, None


@pytest.fixture
def pair() -> tuple[Layer, Layer]:
    torch.manual_seed(2)
    first, second = (Layer(rows, UnquantizedLinearMethod()) for rows in ROWS)
    before = (first.weight.clone(), second.weight.clone())
    lay_together(first, second)
    assert torch.equal(first.weight, before[0]) and torch.equal(second.weight, before[1])
    return first, second


def test_one_product_gives_what_two_do_also_after_the_parameters_were_loaded_anew(
    pair: tuple[Layer, Layer],
) -> None:
    inputs = torch.randn(7, INPUTS)
    for _ in range(2):
        (both,) = project(*pair, inputs)
        want = torch.cat([layer(inputs)[0] for layer in pair], dim=1)
        torch.testing.assert_close(both, want, atol=1e-6, rtol=1e-6)
        # As a weight loader does: in place, and one part of a parameter at a time.
        pair[0].weight.data.narrow(0, 8, 16).copy_(torch.randn(16, INPUTS))
        pair[1].weight.data.copy_(torch.randn(9, INPUTS))
    assert set(dict(pair[0].named_parameters())) == {"weight"}


@pytest.mark.parametrize("moved", [0, 1])
def test_a_parameter_that_was_moved_is_multiplied_by_itself(pair: tuple[Layer, Layer], moved: int) -> None:
    pair[moved].weight.data = pair[moved].weight.data.clone() * 2
    assert joined(*pair) is None
    inputs = torch.randn(5, INPUTS)
    outputs = project(*pair, inputs)
    assert len(outputs) == 2
    for output, layer in zip(outputs, pair):
        assert torch.equal(output, inputs @ layer.weight.T)


def mxfp8_pair() -> tuple[Layer, Layer]:
    config = M3MxFp8Config("plain")
    layers = tuple(Layer(rows, M3MxFp8LinearMethod(config, f"layer.{rows}")) for rows in ROWS)
    for layer in layers:
        value, scale = quantize_mxfp8(torch.randn(len(layer.weight), 32))
        layer.weight = nn.Parameter(value, requires_grad=False)
        layer.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
        layer.weight_block_scale = None
    return layers


def test_mxfp8_projections_are_one_product_until_a_checkpoint_leaves_one_unquantised() -> None:
    first, second = mxfp8_pair()
    lay_together(first, second)
    inputs = torch.randn(5, 32)
    want = [layer.quant_method.apply(layer, inputs) for layer in (first, second)]
    (both,) = project(first, second, inputs)
    torch.testing.assert_close(both, torch.cat(want, 1), atol=1e-5, rtol=1e-5)
    assert both.std() > 0.1
    second.quant_method = UnquantizedLinearMethod()
    assert joined(first, second) is None


@pytest.mark.parametrize("rows", [(256, 128), (256, 96)])
def test_scales_of_blocks_lie_together_where_both_weights_have_them(
    rows: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_M3_MXFP8", "fast")
    method = M3MxFp8LinearMethod(M3MxFp8Config("plain"), "layer")
    monkeypatch.setattr(method.tensors, "check_complete", lambda: None)
    layers = [Layer(count, method) for count in rows]

    def load() -> None:
        for layer in layers:
            value, scale = quantize_mxfp8(
                torch.randn(len(layer.weight), 384) * 2.0 ** torch.randint(-9, 9, ())
            )
            layer.weight.data.copy_(value)
            layer.weight_scale_inv.data.copy_(scale)
            method.process_weights_after_loading(layer)

    for layer in layers:
        layer.weight = nn.Parameter(
            torch.empty(len(layer.weight), 384).to(torch.float8_e4m3fn), requires_grad=False
        )
        layer.weight_scale_inv = nn.Parameter(
            torch.empty(len(layer.weight), 12, dtype=torch.uint8), requires_grad=False
        )
    lay_together(*layers)
    load()
    together = joined(*layers).weight_block_scale
    if rows[1] % 128:
        assert together is None, "the second weight has no blocks"
        return
    for update in range(2):
        want = torch.cat([layer.weight_block_scale for layer in layers])
        assert want.unique().numel() > 1
        assert torch.equal(together, want), f"update {update}: {together} instead of {want}"
        assert joined(*layers).weight_block_scale.data_ptr() == together.data_ptr()
        load()


def test_quantised_projections_of_other_methods_stay_where_they_are() -> None:
    first, second = Layer(4, UnquantizedLinearMethod()), Layer(4, SimpleNamespace())
    at = (first.weight.data_ptr(), second.weight.data_ptr())
    lay_together(first, second)
    assert (first.weight.data_ptr(), second.weight.data_ptr()) == at
    assert joined(second, first) is None
