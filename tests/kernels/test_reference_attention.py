"""The reference operators of attention and storing against brute force."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from m3_kernels.reference.attend_blocks import attend_blocks
from m3_kernels.reference.store_tokens import store_tokens
from m3_kernels.rows import BLOCK_TOKENS

from tests.kernels.cases import Step, brute_attention, brute_selection, steps


@settings(max_examples=40, deadline=None)
@given(steps(max_rows=12), st.integers(0, 2**31), st.sampled_from([(8, 4), (3, 1), (6, 2)]), st.booleans())
def test_attention_equals_brute_force(step: Step, seed: int, heads: tuple[int, int], dense: bool) -> None:
    q_heads, kv_heads = heads
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(step.rows), q_heads, 20, generator=generator)
    k = torch.randn(step.pages, BLOCK_TOKENS, kv_heads, 20, generator=generator)
    v = torch.randn(step.pages, BLOCK_TOKENS, kv_heads, 20, generator=generator)
    chosen = None
    if not dense:
        scores = torch.randn(kv_heads, len(step.rows), step.page_table.shape[1], generator=generator)
        chosen = brute_selection(scores, step.rows, 3, 0, 1)
    out = torch.full(q.shape, 55.0)
    attend_blocks(q, k, v, step.page_table, step.rows, chosen, scale=0.3, out=out)
    expected = brute_attention(q, k, v, step, chosen, 0.3)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(steps(max_rows=12), st.integers(0, 2**31))
def test_unread_tokens_and_unchosen_pages_may_hold_nan(step: Step, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(step.rows), 2, 16, generator=generator)
    clean_k = torch.randn(step.pages, BLOCK_TOKENS, 1, 16, generator=generator)
    clean_v = torch.randn(step.pages, BLOCK_TOKENS, 1, 16, generator=generator)
    chosen = brute_selection(
        torch.randn(1, len(step.rows), step.page_table.shape[1], generator=generator), step.rows, 2, 0, 1
    )
    used = torch.zeros(step.pages, BLOCK_TOKENS, dtype=torch.bool)
    for row, (request, position) in enumerate(zip(step.rows.request.tolist(), step.rows.position.tolist())):
        for block in chosen[0, row].tolist() if request >= 0 else ():
            if block >= 0:
                used[step.page_table[request, block], : position - block * BLOCK_TOKENS + 1] = True
    poisoned_k = clean_k.masked_fill(~used[:, :, None, None], float("nan"))
    poisoned_v = clean_v.masked_fill(~used[:, :, None, None], float("nan"))
    clean, poisoned = torch.empty_like(q), torch.empty_like(q)
    attend_blocks(q, clean_k, clean_v, step.page_table, step.rows, chosen, scale=1.0, out=clean)
    attend_blocks(q, poisoned_k, poisoned_v, step.page_table, step.rows, chosen, scale=1.0, out=poisoned)
    single_row_pages = torch.isnan(poisoned).flatten(1).any(1)
    # A token that another row alone sees is poison for nobody: only invisible tokens were poisoned.
    assert not single_row_pages.any(), f"rows {single_row_pages.nonzero().flatten().tolist()} saw NaN"
    assert torch.equal(clean, poisoned)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32], ids=str)
def test_tokens_are_stored_with_one_rounding_and_padding_is_not_stored(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    count, kv_heads, head_dim, pages = 13, 3, 10, 5
    k = torch.randn(count, kv_heads, head_dim, generator=generator) * 3
    v = torch.randn(count, kv_heads, head_dim, generator=generator) * 600
    index_k = torch.randn(count, 1, head_dim, generator=generator)
    slots = torch.randperm(pages * BLOCK_TOKENS, generator=generator)[:count]
    slots[4] = slots[9] = -1
    pools = [torch.zeros(pages, BLOCK_TOKENS, heads, head_dim).to(dtype) for heads in (kv_heads, kv_heads, 1)]
    store_tokens(k, v, index_k, slots, *pools)
    for name, source, pool in zip(("k", "v", "index_k"), (k, v, index_k), pools):
        limit = 448.0 if dtype == torch.float8_e4m3fn else float("inf")
        expected = torch.zeros(pages * BLOCK_TOKENS, *source.shape[1:])
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot] = source[token].clamp(-limit, limit).to(dtype).float()
        got = pool.float().flatten(0, 1)
        assert torch.equal(got, expected), f"{name}: {(got != expected).nonzero()[:5].tolist()}"
