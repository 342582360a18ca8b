"""Requests that would end the scheduler, or get no answer but a status, answered with an error before it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.configs.model_config import is_minimax_sparse
from sglang.srt.entrypoints.openai.protocol import DEFAULT_MODEL_NAME
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_serving

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Check that token ids can be looked up.

    Raises:
        ValueError: something other than an integer, or an id outside the vocabulary; names it and its place.
    """
    try:
        ids = np.asarray(token_ids)
    except (ValueError, OverflowError):
        ids = np.empty(0, dtype=object)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise ValueError(f"{name} must be a flat list of integers below 2^63.")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        place = int(outside[0])
        raise ValueError(
            f"{name} has token id {token_ids[place]} at position {place}; this model's are 0 to "
            f"{vocab_size - 1}."
        )


def around_validate_one_request(
    original: Callable[..., None], manager: TokenizerManager, obj: Any, input_ids: Sequence[int] | None
) -> None:
    """Around SGLang's checks of a tokenised request: for M3, token ids exist and a prompt has one at least.

    Raises:
        ValueError: SGLang answers with status 400 and the message.
    """
    if is_minimax_sparse(manager.model_config.hf_config):
        _check(obj, input_ids, manager.model_config.vocab_size)
    original(manager, obj, input_ids)


def _check(obj: Any, input_ids: Sequence[int] | None, vocab_size: int) -> None:
    if input_ids is not None and len(input_ids):
        check_token_ids("The prompt", input_ids, vocab_size)
    elif obj.input_embeds is None and not getattr(obj, "session_params", None):
        # A continued session may add nothing to its context.
        raise ValueError("The prompt is empty; send one token at least.")
    top_logprobs = getattr(obj, "top_logprobs_num", None) or 0
    if not isinstance(top_logprobs, int):
        raise ValueError(f"top_logprobs must be an integer, got {top_logprobs!r}.")
    if not 0 <= top_logprobs <= vocab_size:
        raise ValueError(
            f"top_logprobs must be 0 to {vocab_size}, the tokens of this model; got {top_logprobs}."
        )
    sampling = obj.sampling_params or {}
    stop_token_ids = sampling.get("stop_token_ids")
    if stop_token_ids:
        if not isinstance(stop_token_ids, Sequence | set | frozenset):
            raise ValueError(f"stop_token_ids must be a list, got {stop_token_ids!r}.")
        # SGLang leaves out None and converts the rest.
        check_token_ids("stop_token_ids", _integers(stop_token_ids), vocab_size)
    stop_regex = sampling.get("stop_regex") or ()
    patterns = (stop_regex,) if isinstance(stop_regex, str) else stop_regex
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"stop_regex must be a string or a list of strings, got {stop_regex!r}.")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"stop_regex {pattern!r} is no regular expression: {error}.") from error


def _integers(token_ids: Any) -> list[Any]:
    """As SGLang's `SamplingParams` reads a list of token ids."""
    try:
        return [int(token_id) for token_id in token_ids if token_id is not None]
    except (TypeError, ValueError):
        return list(token_ids)


async def around_handle_request(
    original: Callable[..., Any], serving: OpenAIServingBase, request: Any, raw_request: Any
) -> Any:
    """Around OpenAI's endpoints: an M3 server answers status 404 to the name of another model.

    SGLang serves whatever it has under any name, so a client at the wrong server never learns.
    Names of adapters, behind a colon or alone, are SGLang's business.
    """
    manager = serving.tokenizer_manager
    if not is_minimax_sparse(manager.model_config.hf_config) or manager.server_args.enable_lora:
        return await original(serving, request, raw_request)
    # After a weight update from disk the manager has the new path for both; clients keep the name they had.
    served = get_serving().served_model_name
    name = getattr(request, "model", DEFAULT_MODEL_NAME)
    known = (DEFAULT_MODEL_NAME, served, manager.served_model_name, manager.model_path)
    if name.partition(":")[0] in known:
        return await original(serving, request, raw_request)
    return serving.create_error_response(
        f"The model {name!r} does not exist; this server has {served!r}.",
        err_type="NotFoundError",
        status_code=404,
        param="model",
    )


HOOKS = (
    (
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        around_validate_one_request,
        HookType.AROUND,
    ),
    (
        "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request",
        around_handle_request,
        HookType.AROUND,
    ),
)
"""(target, hook, type). Each acts for M3 models only."""
