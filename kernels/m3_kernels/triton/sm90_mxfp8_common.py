"""What the sm90 MXFP8 kernels share: the format in registers, and the type that they multiply in."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from m3_kernels.triton.sm90_common import INTERPRETING

OPERAND = tl.float32 if INTERPRETING else tl.bfloat16
"""Type of the operands of a product; the interpreter multiplies bfloat16 wrongly."""

EARLY = tl.constexpr(not INTERPRETING)
"""Whether a launch is set up while the one before it still runs; its kernel waits before it reads what that
one writes (`early_launch`)."""

LIFT = tl.constexpr(64)
"""Operands are 2 ** LIFT times too small, which the accumulators make good: see `dequantized`."""

_BITS = tl.constexpr(
    """
    {
    .reg .b32 upper, lower;
    shr.b32 upper, $2, 4;
    and.b32 upper, upper, 0x07070707;
    lop3.b32 upper, $2, 0x80808080, upper, 0xea;
    shl.b32 lower, $2, 4;
    and.b32 lower, lower, 0xf0f0f0f0;
    prmt.b32 $0, lower, upper, 0x5140;
    prmt.b32 $1, lower, upper, 0x7362;
    }
    """
)
"""Four E4M3 bytes -> four bfloat16 with the same sign, exponent and significand bits, so 2 ** -120 times the
value, subnormal ones included. The conversion that the compiler has goes through float32, one value at a
time, at an eighth of the rate."""


@triton.jit
def numbers_and_factor(weight, scale, OPERAND: tl.constexpr):
    """E4M3 values and scale bytes as OPERAND: their products are value * 2 ** (scale - 127 - LIFT)."""
    if OPERAND == tl.float32:  # noqa: SIM300 (Triton compares types from the left)
        bits = tl.where(scale == 0, 1 << 22, scale.to(tl.int32) << 23)
        factor = tl.where(scale > 198, 0x7FC00000, bits).to(tl.float32, bitcast=True) * (2.0**-LIFT)
        numbers = weight.to(tl.float32)
    else:
        bits = tl.where(scale > 198, 0x7FC0, (scale.to(tl.int16) + (120 - LIFT)) << 7)
        factor = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
        numbers = tl.inline_asm_elementwise(
            _BITS, "=r,=r,r", [weight.to(tl.uint8, bitcast=True)], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    return numbers, factor


@triton.jit
def dequantized(weight, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OPERAND: tl.constexpr):
    """`[ROWS, COLUMNS]` E4M3 with `[ROWS, COLUMNS // 32]` scale bytes -> OPERAND, columns in another order.

    The numbers are value * 2 ** (scale - 127 - LIFT), so that one product with a bfloat16 factor takes
    the bits of `_BITS` there: exact for the bytes 74 to 198 (2 ** -53 to 2 ** 71); smaller ones lose what
    is below 2 ** -69, greater ones give NaN, as 255 must. E4M3's NaN counts as 480.
    `operand_columns` says which column is where: a thread then finds its four values of a fragment side by
    side in memory.
    """
    numbers, factor = numbers_and_factor(weight, scale, OPERAND)
    groups = tl.reshape(numbers, (ROWS, COLUMNS // 32, 32))
    numbers = tl.reshape(groups * factor[:, :, None], (ROWS, COLUMNS // 16, 4, 2, 2))
    return tl.reshape(tl.permute(numbers, (0, 1, 3, 2, 4)), (ROWS, COLUMNS))


@triton.jit
def operand_columns(COLUMNS: tl.constexpr):
    """`[COLUMNS]`: the column that `dequantized` puts at each place."""
    place = tl.arange(0, COLUMNS)
    column = place // 16 * 16 + place % 8 // 2 * 4 + place % 16 // 8 * 2 + place % 2
    return tl.max_contiguous(tl.multiple_of(column, 2), 2)


@triton.jit
def operand_place(column):
    """The place at which `dequantized` puts a column: the inverse of `operand_columns`."""
    return column // 16 * 16 + column % 4 // 2 * 8 + column % 16 // 4 * 2 + column % 2


@triton.jit
def product(
    weight_rows,
    scale_rows,
    x_rows,
    begin,
    end,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    EVEN: tl.constexpr,
    IN_PLACE: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """`[ROWS, TOKENS]` float32: weight rows times tokens over the columns from `begin` to `end`.

    Args:
        weight_rows, scale_rows: `[ROWS, 1]` pointers to the rows' first column and scale.
        x_rows: `[TOKENS, 1]` pointers to the tokens' first column.
        begin: a multiple of COLUMNS.
        columns: of the weight; a multiple of COLUMNS with EVEN.
        IN_PLACE: whether the tokens' columns are already in the order of `operand_columns`.
    """
    column = tl.arange(0, COLUMNS)
    x_column = column if IN_PLACE else operand_columns(COLUMNS)
    group = tl.arange(0, COLUMNS // 32)
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    # Scales are too narrow for a copy to shared memory ahead of their use, so they are loaded a step before.
    g = (begin // 32 + group)[None, :]
    ahead = tl.load(scale_rows + g, mask=g < columns // 32, other=0)
    for k in range(begin, end, COLUMNS):
        c = (k + column)[None, :]
        p = (k + x_column)[None, :]
        scales = ahead
        g = ((k + COLUMNS) // 32 + group)[None, :]
        ahead = tl.load(scale_rows + g, mask=g < columns // 32, other=0)
        if EVEN:
            operand = tl.load(x_rows + p)
            values = tl.load(weight_rows + c)
        else:
            operand = tl.load(x_rows + p, mask=p < columns, other=0.0)
            values = tl.load(weight_rows + c, mask=c < columns, other=0.0)
        numbers = dequantized(values, scales, ROWS, COLUMNS, OPERAND)
        acc = tl.dot(numbers, tl.trans(operand.to(OPERAND)), acc)
    return acc * (2.0**LIFT)


@triton.jit
def swiglu_oai(gate, up, alpha, limit):
    """`(up + 1) * gate * sigmoid(alpha * gate)`, gate clamped above and up on both sides before.

    NaN stays NaN, as in the reference.
    """
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return (up + 1) * gate / (1 + tl.exp(-alpha * gate))


def check_weight(weight: Tensor, scale: Tensor) -> None:
    """Raise ValueError unless they are contiguous MXFP8 of one shape."""
    if weight.dtype != torch.float8_e4m3fn or scale.dtype != torch.uint8:
        raise ValueError(f"MXFP8 is float8_e4m3fn with uint8 scales, not {weight.dtype} with {scale.dtype}")
    if weight.shape[-1] % 32 or scale.shape != (*weight.shape[:-1], weight.shape[-1] // 32):
        raise ValueError(
            f"MXFP8 has one scale per 32 values along K, not weight {tuple(weight.shape)} "
            f"with scale {tuple(scale.shape)}"
        )
    assert weight.is_contiguous() and scale.is_contiguous()
