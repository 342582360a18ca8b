"""Weight updates that are refused leave the server running with the weights it had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_m3.models.loading import WeightError

Answer = tuple[bool, str]
"""What SGLang's updater returns: success, and a message for whoever asked."""


def around_update_from_tensor(
    original: Callable[..., Answer], updater: Any, *args: Any, **kwargs: Any
) -> Answer:
    """Around `WeightUpdater.update_weights_from_tensor`, which lets what a model raises end the scheduler.

    `loading.load` checks a list of tensors before it copies any.
    """
    try:
        return original(updater, *args, **kwargs)
    except WeightError as error:
        return False, f"Nothing was updated: {error}"


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
    served before.
    """
    before = updater.model_config.model_path
    try:
        return original(updater, model_path, load_format, *args, **kwargs)
    except WeightError as error:
        restored, message = original(updater, before, load_format, *args, **kwargs)
        assert restored, message
        return False, f"{before} is served as before: {error}"
