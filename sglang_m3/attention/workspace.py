"""Scratch memory of the operators: sized at start-up, inside SGLang's memory budget, allocated once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from m3_kernels import workspace_bytes
from m3_kernels.rows import BLOCK_TOKENS
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.configs.model_config import get_minimax_sparse_attention_config
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from sglang_m3.attention.parameters import SelectionParameters, serves

MOST_REQUESTS = 4096
"""Running requests that SGLang takes at most where `--max-running-requests` is not given."""


@dataclass(frozen=True)
class StepShape:
    """The largest step of one rank, and the sizes of its sparse layers.

    Attributes:
        rows: query tokens of a prefill chunk, or of a decode or verify step of all requests if that is more.
        requests: requests that run at the same time.
        blocks: blocks of the longest context and a draft behind it.
        pages: pages of the KV pool.
        q_heads, kv_heads, index_heads: heads of this rank.
        head_dim: elements of a head.
        topk: blocks that a row attends to.
    """

    rows: int
    requests: int
    blocks: int
    pages: int
    q_heads: int
    kv_heads: int
    index_heads: int
    head_dim: int
    topk: int

    @classmethod
    def of(cls, model_config: Any, server_args: Any, *, requests: int, pages: int) -> StepShape:
        """Read it from SGLang's model configuration and resolved server arguments."""
        args = resolving_view(server_args)
        chunk = args.chunked_prefill_size
        longest_extend = chunk if chunk is not None and chunk > 0 else args.max_prefill_tokens
        parallel = get_parallel()
        ranks = parallel.attn_tp_size
        draft_tokens = args.speculative_num_draft_tokens or 0
        decode_rows = requests * max(1, draft_tokens)
        sparse = get_minimax_sparse_attention_config(model_config.hf_config)
        return cls(
            rows=max(longest_extend + (requests if args.enable_mixed_chunk else 0), decode_rows),
            requests=requests,
            blocks=-(-(int(model_config.context_len) + draft_tokens) // BLOCK_TOKENS),
            pages=pages,
            q_heads=model_config.num_attention_heads // ranks,
            kv_heads=model_config.get_num_kv_heads(ranks, parallel.attn_dcp_size),
            index_heads=max(1, sparse["sparse_num_index_heads"] // ranks),
            head_dim=model_config.head_dim,
            topk=SelectionParameters.from_hf_config(model_config.hf_config).topk,
        )


@dataclass(frozen=True)
class Workspaces:
    """uint8 scratch tensors of `plan_prefix`, `choose_blocks` and `attend_blocks`; empty on the CPU."""

    plan: Tensor
    choose: Tensor
    attend: Tensor

    @classmethod
    def allocate(cls, shape: StepShape, device: torch.device | str) -> Workspaces:
        """Allocate for the largest step; the operators assert that a step fits."""
        sizes = bytes_needed(shape) if torch.device(device).type == "cuda" else (0, 0, 0)
        return cls(*(torch.empty(size, dtype=torch.uint8, device=device) for size in sizes))


def bytes_needed(shape: StepShape) -> tuple[int, int, int]:
    """Bytes for plan, choice and attention of any step up to `shape`."""
    return workspace_bytes.step(**asdict(shape))


def around_profile_available_bytes(
    original: Callable[..., int], configurator: Any, *args: Any, **kwargs: Any
) -> int:
    """Around `KVCacheConfigurator._profile_available_bytes`: leave the workspaces out of the KV budget."""
    available = original(configurator, *args, **kwargs)
    config = configurator.model_config
    if configurator.device != "cuda" or not serves(config):
        return available
    # The pool's size is what is being decided; a bound on its pages does for what depends on them.
    shape = StepShape.of(
        config,
        configurator.server_args,
        requests=resolving_view(configurator.server_args).max_running_requests or MOST_REQUESTS,
        pages=available // (BLOCK_TOKENS * 2 * 2 * config.head_dim),
    )
    return available - sum(bytes_needed(shape))
