"""The sm90 MXFP8 products of few tokens, and weights as bfloat16, against float64 and the reference."""

from __future__ import annotations

import pytest
import torch
from m3_kernels.reference.dequantize_mxfp8 import dequantize_mxfp8 as reference_dequantize
from m3_kernels.reference.mxfp8_experts import mxfp8_experts as reference_experts
from m3_kernels.reference.mxfp8_linear import mxfp8_linear as reference_linear

from tests.kernels.sm90 import DEVICE, REAL

from m3_kernels.triton.sm90_mxfp8_dequantize import dequantize_mxfp8  # isort: skip
from m3_kernels.triton.sm90_mxfp8_experts import mxfp8_experts  # isort: skip
from m3_kernels.triton.sm90_mxfp8_experts_few import FewExpertsTile  # isort: skip
from m3_kernels.triton.sm90_mxfp8_linear import mxfp8_linear  # isort: skip
from m3_kernels.triton.sm90_mxfp8_linear_few import FEW_TOKENS, FewTile, few_tile  # isort: skip
from tests.kernels.test_sm90_mxfp8 import (  # isort: skip
    ONE_PRODUCT,
    TWO_PRODUCTS,
    every_number,
    experts_case,
    relative,
    run,
    weight,
)


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "tile"),
    [
        (1, 64, 128, FewTile(16, row_warps=1, column_warps=8, tokens=8, steps=6)),
        (3, 100, 96, FewTile(16, 2, 2, 8, 2)),
        (8, 33, 1536, FewTile(16, 1, 4, 8, 3)),
        (9, 72, 544, FewTile(32, 1, 2, 16, 1)),
        (17, 40, 1024, FewTile(16, 1, 4, 16, 1)),
        (5, 33, 1536, FewTile(16, 4, 1, 8, 2)),
        (31, 130, 672, FewTile(32, 2, 2, 32, 1)),
    ],
)
def test_few_tokens_equal_float64_in_every_division(
    tokens: int, rows: int, columns: int, tile: FewTile
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    value, scale = weight(generator, rows, columns)
    x = torch.randn(tokens, columns + 24, generator=generator).bfloat16().to(DEVICE)[:, :columns]
    got = mxfp8_linear(x, value, scale, tile=tile)
    assert relative(got, reference_linear(x.double(), value, scale)) < ONE_PRODUCT
    for token in (0, tokens - 1):
        alone = mxfp8_linear(x[token : token + 1], value, scale, tile=tile)
        assert torch.equal(alone[0], got[token]), f"token {token} depends on its neighbours"


def test_every_value_is_exact_on_its_way_into_the_matrix_unit() -> None:
    value, scale = every_number(*range(74, 199, 1 if REAL else 124))
    identity = torch.eye(32, dtype=torch.bfloat16, device=DEVICE)
    got = mxfp8_linear(identity, value.to(DEVICE), scale.to(DEVICE), tile=FewTile(16, 1, 1, 16, 1)).T.cpu()
    wrong = (got != reference_dequantize(value, scale, torch.bfloat16)).nonzero()
    assert len(wrong) == 0, f"{len(wrong)} differ, first row {wrong[0].tolist()}"


@pytest.mark.parametrize(
    ("tokens", "columns", "inner", "ranks", "tile"),
    [
        (1, 128, 32, (0, 2), FewExpertsTile(FewTile(16, 1, 8, 8, 1), FewTile(16, 4, 2, 8, 2), walks=1)),
        (19, 96, 160, (1, 1), FewExpertsTile(FewTile(16, 2, 4, 8, 1), FewTile(32, 1, 2, 16, 2), walks=2)),
        (23, 160, 64, (0, 1), FewExpertsTile(FewTile(32, 2, 1, 16, 2), FewTile(16, 2, 4, 8, 1), walks=1)),
    ],
)
def test_experts_of_few_tokens_equal_float64_beyond_the_limits(
    tokens: int, columns: int, inner: int, ranks: tuple[int, int], tile: FewExpertsTile
) -> None:
    case = experts_case(tokens, tokens, 3, columns, inner, 2)
    case["topk_ids"][1::4] = -1
    case["topk_weights"][1::4] = float("nan")
    got = run(mxfp8_experts, case, *ranks, tile=tile)
    want = run(reference_experts, case | {"x": case["x"].double()}, *ranks)
    assert relative(got, want) < TWO_PRODUCTS and not got[1::4].any()
    if REAL:
        assert torch.equal(got, run(mxfp8_experts, case, *ranks, tile=tile))


def test_weights_as_bfloat16_are_those_of_the_reference() -> None:
    # The interpreter rounds bfloat16's subnormal numbers its own way, and takes E4M3's NaN for a number.
    value, scale = every_number(*(range(256) if REAL else range(10, 240, 23)))
    got = dequantize_mxfp8(value.to(DEVICE), scale.to(DEVICE)).cpu()
    want = reference_dequantize(value, scale, torch.bfloat16)
    assert torch.equal(got.isnan(), want.isnan())
    wrong = (got.nan_to_num() != want.nan_to_num()).nonzero()
    assert len(wrong) == 0, f"{len(wrong)} differ, first row {wrong[0].tolist()}"


@pytest.mark.parametrize("columns", [384, 1024, 1536, 2048, 3072, 6144, 8192, 12288])
def test_a_warp_has_all_its_weights_in_flight_with_m3_widths(columns: int) -> None:
    tile = few_tile(columns)
    assert tile.column_warps * tile.steps * 128 >= columns
    assert tile.row_warps * tile.column_warps in (4, 8, 16)
    assert tile.tokens == FEW_TOKENS
