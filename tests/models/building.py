"""Build the model in the test's process, as one of any number of ranks, without communication."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from sglang.srt import runtime_context
from sglang.srt.arg_groups import model_override_base
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs
from torch import Tensor

from sglang_m3 import overrides
from sglang_m3.models.minimax_m3 import MiniMaxM3SparseForConditionalGeneration


@contextmanager
def as_rank(
    checkpoint: Path, rank: int = 0, *, tp: int = 1, ep: int = 1, pp: int = 1, dtype: str = "float32"
) -> Iterator[Any]:
    """SGLang's runtime context of rank `rank` of `tp * pp`; yields the configuration that models get.

    With `ep`, experts are spread over that many groups of the tensor-parallel ranks.
    """
    providers = model_override_base._MODEL_OVERRIDE_FNS
    before = {name: list(known) for name, known in providers.items()}
    overrides.register()
    try:
        args = ServerArgs(model_path=str(checkpoint), dtype=dtype, skip_tokenizer_init=True)
        args.resolve_once()
    finally:
        providers.clear()
        providers.update(before)
    tp_rank, pp_rank = rank % tp, rank // tp
    stage = SimpleNamespace(is_first_rank=pp_rank == 0, is_last_rank=pp_rank == pp - 1, world_size=pp)
    parallel = {
        "tp_size": tp,
        "tp_rank": tp_rank,
        "attn_tp_size": tp,
        "attn_tp_rank": tp_rank,
        "moe_ep_size": ep,
        "moe_ep_rank": tp_rank // (tp // ep),
        "moe_tp_size": tp // ep,
        "moe_tp_rank": tp_rank % (tp // ep),
        "pp_size": pp,
        "pp_rank": pp_rank,
        "pp_group": stage,
        "tp_group": SimpleNamespace(world_size=tp, rank_in_group=tp_rank, cpu_group=None),
        "attn_tp_group": SimpleNamespace(world_size=tp, rank_in_group=tp_rank),
        "moe_tp_group": SimpleNamespace(world_size=tp // ep, rank_in_group=tp_rank % (tp // ep)),
        "moe_ep_group": SimpleNamespace(world_size=ep, rank_in_group=tp_rank // (tp // ep)),
    }
    context = runtime_context.create_context(
        args, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0)
    )
    with runtime_context.use_context(context), runtime_context.get_parallel().override(**parallel):
        yield ModelConfig.from_server_args(args).hf_config


def build(config: Any, dtype: torch.dtype = torch.float32) -> MiniMaxM3SparseForConditionalGeneration:
    """The model within `as_rank`, with every parameter filled with NaN."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = MiniMaxM3SparseForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(default)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    return model


def tensors(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and values of a checkpoint, file by file."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
