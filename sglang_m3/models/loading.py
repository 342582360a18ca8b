"""Load checkpoint tensors, each exactly once, or say which names do not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import Tensor
from torch.nn import Parameter

from sglang_m3.models.weight_map import DRAFT_TENSORS, SCALE_SUFFIX, Destination, WeightMap, find

logger = logging.getLogger(__name__)

NAMES_SHOWN = 20
"""Names of one kind that an error lists; it counts the rest."""


_UNQUANTISED = "but the server is not set to a quantisation"


class WeightError(ValueError):
    """Tensors that do not fit the model; the message lists their names by what is wrong with them."""


@dataclass
class Account:
    """What has become of the tensors of one `load_weights` call.

    All ranks get all tensors and come to the same result, whatever parameters they have.

    Attributes:
        quantised: whether the server keeps weights quantised.
        used: name -> dtype of every tensor that fits.
        problems: what is wrong -> names, with what was found where that helps.
        drafts: tensors of draft heads, which are skipped.
    """

    quantised: bool = False
    used: dict[str, torch.dtype] = field(default_factory=dict)
    problems: dict[str, list[str]] = field(default_factory=dict)
    drafts: int = 0

    def enter(self, weights: WeightMap, name: str, tensor: Tensor) -> bool:
        """Account for one tensor. True: it fits, and is to be copied if its parameter is on this rank."""
        if DRAFT_TENSORS.match(name):
            self.drafts += 1
            return False
        to = find(weights, name)
        if to is None:
            return self._fail("unknown", name)
        if name in self.used:
            return self._fail("duplicate", name)
        self.used[name] = tensor.dtype
        if tuple(tensor.shape) != to.shape:
            return self._fail("misshapen", f"{name} is {_shape(tensor.shape)}, not {_shape(to.shape)}")
        if tensor.dtype in (torch.float8_e4m3fn, torch.uint8) and not (self.quantised and to.quantisable):
            wrong = "which M3's format does not have" if self.quantised else _UNQUANTISED
            return self._fail(f"quantised, {wrong}", name)
        return True

    def close(self, weights: WeightMap, *, complete: bool) -> None:
        """Raise for everything that was wrong.

        Args:
            complete: every tensor of the checkpoint must have come, as on the initial load.

        Raises:
            WeightError: missing, unknown, duplicate or misshapen tensors.
        """
        if complete:
            names = [*weights, *(name + SCALE_SUFFIX for name in self.used if self._has_scales(name))]
            for name in names:
                if name not in self.used:
                    self._fail("missing", name)
            for name in self.used:
                weight = name.removesuffix(SCALE_SUFFIX)
                if weight != name and weight in self.used and not self._has_scales(weight):
                    self._fail("scales of a weight that is not float8_e4m3fn", name)
        if self.problems:
            raise WeightError(f"weights that do not fit MiniMax-M3: {'; '.join(self._lines())}")

    def _has_scales(self, name: str) -> bool:
        return self.used[name] == torch.float8_e4m3fn

    def _fail(self, problem: str, name: str) -> bool:
        self.problems.setdefault(problem, []).append(name)
        return False

    def _lines(self) -> Iterable[str]:
        for problem, names in self.problems.items():
            shown = ", ".join(names[:NAMES_SHOWN])
            rest = len(names) - NAMES_SHOWN
            yield f"{len(names)} {problem}: {shown}" + (f" and {rest} more" if rest > 0 else "")


def load(
    weights: WeightMap,
    parameters: Mapping[str, Parameter],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    complete: bool,
) -> set[str]:
    """Copy tensors into the parameters of this rank.

    All names and shapes of a list are checked before the first copy, so an update that is refused changed
    nothing. Tensors that come one by one, as from files, are copied until the first that does not fit; the
    rest is only accounted for, so that the error is complete.

    Args:
        weights: the checkpoint's tensors and where they go.
        parameters: of this rank. Destinations that are not among them are another pipeline stage's.
        tensors: name and value; the value is whole, not split over ranks.
        complete: every tensor must come, as on the initial load.

    Returns:
        Names of the tensors used.

    Raises:
        WeightError: see `Account.close`.
    """
    account = Account(quantised=any(name.endswith(SCALE_SUFFIX) for name in parameters))
    if isinstance(tensors, list | tuple):
        fitting = [(n, tensor) for n, tensor in tensors if account.enter(weights, n, tensor)]
        account.close(weights, complete=complete)
        for name, tensor in fitting:
            _copy(find(weights, name), parameters, tensor)
    else:
        for name, tensor in tensors:
            if account.enter(weights, name, tensor) and not account.problems:
                _copy(find(weights, name), parameters, tensor)
        account.close(weights, complete=complete)
    if account.drafts:
        logger.info("sglang-m3: skipped %d tensors of draft heads (mtp.*, dspark.*).", account.drafts)
    return set(account.used)


def _copy(to: Destination | None, parameters: Mapping[str, Parameter], tensor: Tensor) -> None:
    assert to is not None
    parameter = parameters.get(to.parameter)
    if parameter is None:
        return
    loader: Callable[..., Any] = getattr(parameter, "weight_loader", default_weight_loader)
    if to.expert is not None:
        loader(parameter, tensor, to.parameter, shard_id=to.shard, expert_id=to.expert)
    elif to.shard is not None:
        loader(parameter, tensor, to.shard)
    else:
        loader(parameter, tensor)


def check_covered(
    weights: WeightMap, parameters: Iterable[str], *, unloaded: Iterable[str], whole: bool
) -> None:
    """Assert that map and model agree.

    Args:
        weights: the checkpoint's tensors and where they go.
        parameters: names of this rank's parameters.
        unloaded: parameters that no checkpoint tensor fills.
        whole: the rank has all layers; without pipeline parallelism.
    """
    targets = {to.parameter for to in weights.values()}
    present = {name for name in parameters if not name.endswith(SCALE_SUFFIX)} - set(unloaded)
    assert present <= targets, f"no checkpoint tensor fills {sorted(present - targets)[:5]}"
    assert not whole or targets <= present, f"no parameter takes {sorted(targets - present)[:5]}"


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
