"""Write down which blocks every query token chose (`SGLANG_M3_RECORD_BLOCKS`)."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor

from sglang_m3.attention.step import Step


@dataclass(frozen=True)
class RecordedStep:
    """One step's selections.

    Attributes:
        request_ids: SGLang's id of each request in the step.
        request: `[T]` int32, index into `request_ids` of each query token.
        position: `[T]` int32, absolute position of each query token.
        chosen: sparse layer -> `[H, T, topk]` int32, as `choose_blocks` returned it.
    """

    request_ids: list[str]
    request: Tensor
    position: Tensor
    chosen: dict[int, Tensor]


class BlockRecorder:
    """Collects a step's selections layer by layer and writes one file per step.

    Files are named `<process>-<step>.pt`; `load` reads a directory back in order.
    """

    def __init__(self, directory: Path, last_layer: int) -> None:
        self._directory = directory
        self._last_layer = last_layer
        self._steps = itertools.count()
        self._chosen: dict[int, Tensor] = {}

    def record(self, forward_batch: ForwardBatch, step: Step, layer_id: int, chosen: Tensor) -> None:
        self._chosen[layer_id] = chosen.cpu().clone()
        if layer_id != self._last_layer:
            return
        content = {
            "request_ids": list(forward_batch.rids or ()),
            "request": step.rows.request.cpu(),
            "position": step.rows.position.cpu(),
            "chosen": self._chosen,
        }
        path = self._directory / f"{os.getpid()}-{next(self._steps):08d}.pt"
        temporary = path.with_suffix(".partial")
        torch.save(content, temporary)
        temporary.rename(path)
        self._chosen = {}


def load(directory: Path) -> list[RecordedStep]:
    """All recorded steps, oldest first within a process."""
    return [RecordedStep(**torch.load(path, weights_only=True)) for path in sorted(directory.glob("*.pt"))]
