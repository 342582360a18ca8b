"""Multiply by an MXFP8 weight on sm90, by three ways.

Few tokens: `sm90_mxfp8_linear_few`, one launch whose warps share the columns. Some:
`sm90_mxfp8_linear_tiles`, which holds the weights in registers and splits K over programs. Many: the weight
is written as bfloat16 once per call, which are the same numbers, and cuBLAS multiplies.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from m3_kernels.triton.sm90_common import multiprocessors
from m3_kernels.triton.sm90_mxfp8_common import check_weight
from m3_kernels.triton.sm90_mxfp8_dequantize import dequantize_mxfp8
from m3_kernels.triton.sm90_mxfp8_linear_few import FEW_TOKENS, FewTile, few_tile, multiply_few
from m3_kernels.triton.sm90_mxfp8_linear_tiles import CHUNK, LinearTile, multiply_tiles

SOME_TOKENS = 128
"""With more, writing the weight as bfloat16 pays off."""

TOKENS_OF_EVERY_KERNEL = (FEW_TOKENS, 16, 32, 64, SOME_TOKENS, SOME_TOKENS + 1)
"""Products by a weight of so many tokens need between them every kernel that others by it need."""

NARROW = 2048
"""Columns up to which one launch is the better way for few tokens; with more, K split over two is."""

HELD = (5, 6)
"""Chunks of 128 columns that a program's registers hold with 64 tokens in a tile, and at most."""


def linear_tile(tokens: int, rows: int, columns: int, processors: int) -> FewTile | LinearTile | None:
    """The division for so many tokens on a GPU of so many multiprocessors, None for the weight as bfloat16.

    As few parts as registers allow, but where possible no more programs than run at once: two of 64 rows or
    one of 128 on a multiprocessor.
    """
    chunks = triton.cdiv(columns, CHUNK)
    five, six = (triton.cdiv(chunks, triton.cdiv(chunks, held)) for held in HELD)

    def at_once(tile_rows: int, steps: int, walks: int = 1) -> bool:
        programs = triton.cdiv(rows, tile_rows) * triton.cdiv(chunks, steps) * walks
        return programs <= processors * (128 // tile_rows)

    if tokens <= FEW_TOKENS and (columns <= NARROW or not at_once(64, five)):
        return few_tile(columns)
    steps = six if at_once(64, six) and not at_once(64, five) else five
    tile_rows = 128 if steps == chunks else 64
    if tokens <= 16:
        if chunks >= 4 and at_once(64, 4):
            return LinearTile(64, tokens=16, chunks=4, steps=1, walks=1)
        return LinearTile(tile_rows, 16, 1, steps, 1)
    if tokens <= 32:
        return LinearTile(tile_rows, 32, 1, steps, 1)
    if tokens <= 64 and at_once(tile_rows, steps, 2):
        return LinearTile(tile_rows, 32, 1, steps, 2)
    if tokens <= SOME_TOKENS and at_once(128, five):
        return LinearTile(128, 64, 1, five, walks=2 if tokens > 64 and at_once(128, five, 2) else 1)
    return LinearTile(64, 32, 1, steps, 1) if tokens <= 64 else None


def mxfp8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, *, tile: LinearTile | FewTile | None = None
) -> Tensor:
    """`x` times the transpose of the weight's numbers; contract: `m3_kernels.reference.mxfp8_linear`.

    bfloat16 only. Sums run in float32, in an order that depends on the shapes alone. Up to SOME_TOKENS tokens
    take scratch memory of four bytes per value of the result and part of K, more take two bytes per value of
    the weight and have sums as PyTorch's bfloat16 product has them. `tile` is for tuning.

    The launch may begin before its predecessor on the stream has ended, that one before its own, and so on;
    it reads weight and scale then, which must be older than all of these. `x` may be what the predecessor
    writes.
    """
    check_weight(weight, scale)
    if x.dtype != torch.bfloat16:
        raise ValueError(f"the sm90 kernel multiplies bfloat16, not {x.dtype}")
    tokens, columns = x.shape
    rows = weight.shape[0]
    if tokens == 0:
        return x.new_empty(0, rows)
    if x.stride(1) != 1:
        x = x.contiguous()
    tile = tile or linear_tile(tokens, rows, columns, multiprocessors(x.device))
    if tile is None:
        return torch.mm(x, dequantize_mxfp8(weight, scale).T)
    out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    if isinstance(tile, FewTile):
        multiply_few(x, weight, scale, out, tile)
    else:
        multiply_tiles(x, weight, scale, out, tile)
    return out
