"""Write down which experts every token took, beside the blocks that it chose (`SGLANG_M3_RECORD_BLOCKS`).

SGLang's own recorder of experts counts on the GPU inside the model's loop over layers, and needs expert load
balancing's view of them; this one notes ids, which is what a report needs.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sglang_m3 import settings

ENDING = ".experts"


@dataclass(frozen=True)
class RecordedExperts:
    """One step's experts.

    Attributes:
        experts: of the model, in each layer.
        taken: layer -> `[T, choices]` int32, ids of the model's experts.
    """

    experts: int
    taken: dict[int, Tensor]


class ExpertRecorder:
    """Collects a step's experts layer by layer and writes one file per step, `<process>-<step>.experts`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._last_layer = -1
        self._steps = itertools.count()
        self._taken: dict[int, Tensor] = {}

    def expect(self, layer: int) -> None:
        """Experts of this layer belong to a step."""
        self._last_layer = max(self._last_layer, layer)

    def record(self, layer: int, ids: Tensor, experts: int) -> None:
        self._taken[layer] = ids.cpu().to(torch.int32, copy=True)
        if layer != self._last_layer:
            return
        path = self._directory / f"{os.getpid()}-{next(self._steps):08d}{ENDING}"
        temporary = path.with_suffix(f"{ENDING}-partial")
        torch.save({"experts": experts, "taken": self._taken}, temporary)
        temporary.rename(path)
        self._taken = {}


def load(directory: Path) -> list[RecordedExperts]:
    """All recorded steps, oldest first within a process."""
    files = sorted(directory.glob(f"*{ENDING}"))
    return [RecordedExperts(**torch.load(path, weights_only=True)) for path in files]


_recorder: ExpertRecorder | None = None


def recorder_of(layer: int) -> ExpertRecorder | None:
    """This process's recorder, told of a layer with experts; None where nothing is to be written down."""
    global _recorder
    directory = settings.read().record_blocks
    if directory is None:
        return None
    if _recorder is None:
        _recorder = ExpertRecorder(directory)
    _recorder.expect(layer)
    return _recorder
