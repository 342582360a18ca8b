"""Weight updates that are refused leave the server running with the weights it had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

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

    Tensors that were copied before the first that does not fit are put back from the checkpoint that was
    served before, on every rank of the pipeline stage.
    """
    before = updater.model_config.model_path
    answer, problem = _attempt(original, updater, model_path, load_format, *args, **kwargs)
    if problem is None:
        return answer
    _forget_problems(updater.get_model())
    restored, message = original(updater, before, load_format, *args, **kwargs)
    if not restored:
        return False, f"{problem}; {before} cannot be loaded again, start the server anew: {message}"
    return False, f"{before} is served as before: {problem}"


def _attempt(original: Callable[..., Answer], *args: Any, **kwargs: Any) -> tuple[Answer, str | None]:
    """SGLang's answer, and what any rank found wrong: a rank sees only the experts that it holds."""
    answer, problem = (False, ""), None
    try:
        answer = original(*args, **kwargs)
    except WeightError as error:
        problem = str(error)
    return answer, next((found for found in _on_all_ranks(problem) if found is not None), None)


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
