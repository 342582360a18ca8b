"""Weight updates that are refused leave the server running with the weights it had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.runtime_context import get_parallel

from sglang_m3.checkpoint import check_local
from sglang_m3.models.loading import WeightError

Answer = tuple[bool, str]
"""What SGLang's updater returns: success, and a message for whoever asked."""


def around_update_from_tensor(
    original: Callable[..., Answer], updater: Any, *args: Any, **kwargs: Any
) -> Answer:
    """Around `WeightUpdater.update_weights_from_tensor`, which lets what a model raises end the scheduler.

    `loading.load` checks names and shapes of a list before it copies any tensor; what is wrong with a format
    is found at the tensor, after those before it were copied.
    """
    answer, problem = _attempt(original, updater, *args, **kwargs)
    if problem is None:
        return answer
    _forget_problems(updater.get_model())
    return False, f"{problem}; tensors before the first that does not fit may be new: send all of them again"


def around_update_from_disk(
    original: Callable[..., Answer],
    updater: Any,
    model_path: str,
    load_format: str,
    *args: Any,
    **kwargs: Any,
) -> Answer:
    """Around `WeightUpdater.update_weights_from_disk`, whose way back loads the refused path again.

    Files that are missing or cut short are refused before any is read. Tensors that were copied before the
    first that does not fit are put back from the checkpoint that was served before, on every rank of the
    pipeline stage.
    """
    before = updater.model_config.model_path
    problem = _first(_on_all_ranks(_unusable(model_path, load_format)))
    if problem is not None:
        return False, f"{before} is served as before: {problem}"
    answer, problem = _attempt(original, updater, model_path, load_format, *args, **kwargs)
    if problem is None:
        if not answer[0]:
            # SGLang has put the new path there already, and would load it when the next update is refused.
            updater.model_config.model_path = before
        return answer
    _forget_problems(updater.get_model())
    restored, message = original(updater, before, load_format, *args, **kwargs)
    if not restored:
        return False, f"{problem}; {before} cannot be loaded again, start the server anew: {message}"
    return False, f"{before} is served as before: {problem}"


def _attempt(original: Callable[..., Answer], *args: Any, **kwargs: Any) -> tuple[Answer, str | None]:
    """SGLang's answer, and what any rank found wrong: a rank sees only the experts that it holds.

    Raises:
        WeightError: what is wrong with a format, in a pipeline. Names and shapes are refused by all stages
            alike, but a format's errors are known where the layer is, when stages before may have the new
            weights and have said so. Such a server ends.
    """
    answer, error = (False, ""), None
    try:
        answer = original(*args, **kwargs)
    except WeightError as found:
        error = found
    if error is not None and type(error) is not WeightError and get_parallel().pp_size > 1:
        raise error
    problem = None if error is None else str(error)
    return answer, _first(_on_all_ranks(problem))


def _unusable(model_path: str, load_format: str) -> str | None:
    try:
        LoadFormat(load_format)
        check_local(model_path, load_format)
    except ValueError as error:
        return str(error)
    return None


def _first(problems: list[str | None]) -> str | None:
    return next((problem for problem in problems if problem is not None), None)


def _on_all_ranks(problem: str | None) -> list[str | None]:
    """Of the ranks that hold the same layers; a pipeline's stages get an update one after another."""
    ranks = get_parallel().tp_group
    problems: list[str | None] = [problem] * ranks.world_size
    if ranks.world_size > 1:
        torch.distributed.all_gather_object(problems, problem, group=ranks.cpu_group)
    return problems


def _forget_problems(model: torch.nn.Module) -> None:
    """Layers keep what was wrong with a tensor until it arrives again; a refused update ends that."""
    for module in model.modules():
        tensors = getattr(getattr(module, "quant_method", None), "tensors", None)
        if tensors is not None:
            tensors.forget_problems()
