"""Requests that would end the scheduler, or get no answer but a status, answered with an error before it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.entrypoints.openai.protocol import DEFAULT_MODEL_NAME
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import SessionParams
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_observability, get_serving

from sglang_m3.attention.parameters import serves

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_ANTHROPIC = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing"
_READERS = ("sglang.srt.entrypoints.openai.protocol", "sglang.srt.managers.io_struct")
"""Where SGLang reads requests."""

ONE_PER_REQUEST = (
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_sampling_mask",
    "sampling_logprobs_mode",
    "return_hidden_states",
    "lora_path",
    "lora_id",
    "custom_logit_processor",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
)
"""Fields that may be a list in a batch only; SGLang hands a list on to the scheduler otherwise."""


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


def check_embeddings(embeddings: Sequence[Sequence[float]], hidden_size: int, dtype: torch.dtype) -> None:
    """Check that embeddings can stand in the place of a prompt's.

    Raises:
        ValueError: not `[tokens, hidden_size]` numbers, or one that `dtype` does not hold: infinities and NaN
            would spread to requests that attend beside this one. Names the place.
    """
    try:
        numbers = np.asarray(embeddings)
    except (TypeError, ValueError, OverflowError):
        numbers = np.empty(0, dtype=object)
    if numbers.dtype.kind not in "iuf" or numbers.ndim != 2 or numbers.shape[1] != hidden_size:
        raise ValueError(
            f"input_embeds must be a list of {hidden_size} numbers for each token of the prompt."
        )
    outside = np.argwhere(~(np.abs(numbers) <= torch.finfo(dtype).max))
    if outside.size:
        token, place = outside[0].tolist()
        raise ValueError(
            f"input_embeds has {numbers[token, place]} at place {place} of token {token}; this model takes "
            f"finite numbers of {str(dtype).removeprefix('torch.')}."
        )


def around_validate_one_request(
    original: Callable[..., None], manager: TokenizerManager, obj: Any, input_ids: Sequence[int] | None
) -> None:
    """Around SGLang's checks of a tokenised request: for M3, token ids exist and a prompt has one at least;
    embeddings in their place are as wide as the model's.

    Raises:
        ValueError: SGLang answers with status 400 and the message.
    """
    config = manager.model_config
    if serves(config):
        if getattr(obj, "input_embeds", None) is not None:
            check_embeddings(obj.input_embeds, config.hidden_size, config.dtype)
        _check(obj, input_ids, config.vocab_size)
    original(manager, obj, input_ids)


def around_init_req_state(
    original: Callable[..., None], manager: TokenizerManager, obj: Any, *args: Any
) -> None:
    """Around SGLang's registration of a request, or of a batch of them: for M3, its ids are strings."""
    if serves(manager.model_config):
        # Parallel samples of one prompt come one by one, without `is_single`.
        for request_id in (obj.rid,) if getattr(obj, "is_single", True) else obj.rid:
            if not isinstance(request_id, str):
                raise ValueError(f"rid must be a string for each prompt, got {request_id!r:.60}.")
    original(manager, obj, *args)


def _check(obj: Any, input_ids: Sequence[int] | None, vocab_size: int) -> None:
    session = getattr(obj, "session_params", None) or {}
    _check_types(obj, session)
    if isinstance(input_ids, int):
        raise ValueError("input_ids must be a list of token ids for each prompt.")
    if input_ids is not None and len(input_ids):
        check_token_ids("The prompt", input_ids, vocab_size)
    elif obj.input_embeds is None and not session:
        # A continued session may add nothing to its context.
        raise ValueError("The prompt is empty; send one token at least.")
    top_logprobs = getattr(obj, "top_logprobs_num", None) or 0
    if not isinstance(top_logprobs, int):
        raise ValueError(f"top_logprobs must be an integer, got {top_logprobs!r}.")
    if not 0 <= top_logprobs <= vocab_size:
        raise ValueError(
            f"top_logprobs must be 0 to {vocab_size}, the tokens of this model; got {top_logprobs}."
        )
    _check_stops(obj.sampling_params or {}, vocab_size)


def _check_types(obj: Any, session: Mapping[str, Any]) -> None:
    for name in ONE_PER_REQUEST:
        if isinstance(getattr(obj, name, None), list):
            raise ValueError(f"{name} must be one value for each prompt, got {getattr(obj, name)!r:.60}.")
    overrides = getattr(obj, "positional_embed_overrides", None)
    if overrides is not None and not isinstance(overrides, PositionalEmbeds):
        raise ValueError("positional_embed_overrides are tensors, which JSON cannot give.")
    if not isinstance(obj.sampling_params or {}, Mapping):
        raise ValueError(
            f"sampling_params must be an object for each prompt, got {obj.sampling_params!r:.60}."
        )
    unknown = sorted(session.keys() - set(SessionParams.__struct_fields__))
    if unknown:
        raise ValueError(f"session_params has no field {unknown[0]!r}.")
    labels = get_observability().tokenizer_metrics_allowed_custom_labels or ()
    unknown = sorted((getattr(obj, "custom_labels", None) or {}).keys() - set(labels))
    if unknown:
        raise ValueError(f"custom_labels has {unknown[0]!r}, which this server does not count by.")


def _check_stops(sampling: Mapping[str, Any], vocab_size: int) -> None:
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
    """Around OpenAI's endpoints: an M3 server answers status 404 to the name of another model."""
    problem = _unknown_model(serving.tokenizer_manager, getattr(request, "model", DEFAULT_MODEL_NAME))
    if problem is None:
        return await original(serving, request, raw_request)
    return serving.create_error_response(problem, err_type="NotFoundError", status_code=404, param="model")


async def around_handle_messages(
    original: Callable[..., Any], serving: AnthropicServing, request: Any, raw_request: Any
) -> Any:
    """Around Anthropic's endpoints: likewise."""
    problem = _unknown_model(serving.openai_serving_chat.tokenizer_manager, request.model)
    if problem is None:
        return await original(serving, request, raw_request)
    return serving._error_response(404, "not_found_error", problem)


def _unknown_model(manager: TokenizerManager, name: str) -> str | None:
    """What is wrong with a model's name. SGLang serves whatever it has under any name, so a client at the
    wrong server never learns. Names of adapters, behind a colon or alone, are SGLang's business."""
    if not serves(manager.model_config) or manager.server_args.enable_lora:
        return None
    # After a weight update from disk the manager has the new path for both; clients keep the name they had.
    served = get_serving().served_model_name
    known = (DEFAULT_MODEL_NAME, served, manager.served_model_name, manager.model_path)
    if name in known or name.partition(":")[0] in known:
        return None
    return f"The model {name!r} does not exist; this server has {served!r}."


def before_launch_server(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Before the start of an HTTP server: one of M3 answers requests of the wrong types in words."""
    if serves(model_config_of(server_args)):
        from sglang.srt.entrypoints.http_server import app

        answer_wrong_types(app)


def answer_wrong_types(app: FastAPI) -> None:
    """Answer status 400 where SGLang stumbles over a value of the wrong type while it reads a request.

    It takes a chat request and its `response_format` for objects without looking, for which the status is
    500. Other errors stay what they are.
    """
    for kind in (AttributeError, IndexError, TypeError):
        app.add_exception_handler(kind, _answer_wrong_types)


async def _answer_wrong_types(request: Request, error: Exception) -> Response:
    from fastapi.exceptions import RequestValidationError

    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames or frames[-1].f_globals.get("__name__") not in _READERS:
        raise error
    place, message = ["body"], f"has a field of the wrong type: {error}"
    if isinstance(error, AttributeError) and "values" in frames[-1].f_locals:
        body = frames[-1].f_locals["values"]
        message = f"must be an object, not {error.obj!r:.60}"
        if body is not error.obj:
            place += [name for name, value in body.items() if value is error.obj]
    problem = {"type": "wrong_type", "loc": tuple(place), "msg": message}
    answer = request.app.exception_handlers[RequestValidationError]
    return await answer(request, RequestValidationError([problem]))


HOOKS = (
    (
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        around_validate_one_request,
        HookType.AROUND,
    ),
    (
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._init_req_state",
        around_init_req_state,
        HookType.AROUND,
    ),
    (
        "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request",
        around_handle_request,
        HookType.AROUND,
    ),
    *(
        (f"{_ANTHROPIC}.{method}", around_handle_messages, HookType.AROUND)
        for method in ("handle_messages", "handle_count_tokens")
    ),
)
"""(target, hook, type). Each acts for M3 models only."""

LISTENING = (("sglang.srt.entrypoints.http_server.launch_server", before_launch_server, HookType.BEFORE),)
"""Likewise, for the process that listens."""
