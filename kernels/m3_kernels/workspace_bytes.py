"""How much scratch memory the sm90 operators need for any step up to a given size."""

from __future__ import annotations


def plan_prefix(rows: int, requests: int) -> int:
    """Bytes for `plan_prefix` of at most `rows` rows of at most `requests` requests."""
    from m3_kernels.triton.sm90_plan_prefix import plan_prefix_workspace_bytes

    return plan_prefix_workspace_bytes(rows, requests)


def choose_blocks(rows: int, index_heads: int, blocks: int) -> int:
    """Bytes for `choose_blocks` of at most `rows` rows and `blocks` blocks; bounded, see the operator."""
    from m3_kernels.triton.sm90_choose_blocks import choose_blocks_workspace_bytes

    return choose_blocks_workspace_bytes(rows, index_heads, blocks)


def attend_blocks(
    rows: int, q_heads: int, kv_heads: int, head_dim: int, *, topk: int | None, pages: int
) -> int:
    """Bytes for `attend_blocks` of at most `rows` rows.

    A step's need does not grow with its rows throughout (few rows are split over more programs), so the
    maximum is taken over all row counts.
    """
    from m3_kernels.triton.sm90_attend_blocks import attend_blocks_workspace_bytes

    return max(
        attend_blocks_workspace_bytes(count, q_heads, kv_heads, head_dim, topk=topk, pages=pages)
        for count in range(1, rows + 1)
    )


def step(
    *,
    rows: int,
    requests: int,
    blocks: int,
    pages: int,
    q_heads: int,
    kv_heads: int,
    index_heads: int,
    head_dim: int,
    topk: int,
) -> tuple[int, int, int]:
    """Bytes for plan, choice and attention, dense layers' included, of any step of a rank up to this one."""
    return (
        plan_prefix(rows, requests),
        choose_blocks(rows, index_heads, blocks),
        max(
            attend_blocks(rows, q_heads, kv_heads, head_dim, topk=attended, pages=pages)
            for attended in (topk, None)
        ),
    )
