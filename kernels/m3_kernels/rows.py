"""The query tokens of one step, as every operator sees them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

BLOCK_TOKENS = 128
"""Tokens per block of the sparse attention, which is also SGLang's page size here."""


@dataclass(frozen=True)
class Rows:
    """One row per query token: a decode step has one per request, an extend chunk hundreds.

    Attributes:
        request: `[T]` int32, row of `page_table` that the query token belongs to; -1 marks a padded row,
            which is neither read nor written (its output entries are unspecified unless an operator says so).
        position: `[T]` int32, absolute position (tokens, from 0) of the query token in its request.
            Ignored for padded rows.

    Both are contiguous.

    A row sees the tokens `0 .. position` of its request, that is the blocks `0 .. position // 128`.
    The page table that goes with the rows is `[R, B]` int32: the physical page of each block of each
    request. Entries past a request's last visible block are never read and may hold anything.
    """

    request: Tensor
    position: Tensor

    def __post_init__(self) -> None:
        assert self.request.shape == self.position.shape and self.request.dim() == 1
        assert self.request.device == self.position.device
        assert self.request.is_contiguous() and self.position.is_contiguous()

    def __len__(self) -> int:
        return self.request.shape[0]
