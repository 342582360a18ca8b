"""What SGLang's endpoints get wrong in requests for M3's thinking."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.plugins.hook_registry import HookType

if TYPE_CHECKING:
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""`none` and `minimal` turn thinking off; SGLang drops every other value without a word."""


def around_convert_to_chat_completion_request(
    original: Callable[[AnthropicServing, AnthropicMessagesRequest], ChatCompletionRequest],
    serving: AnthropicServing,
    anthropic_request: AnthropicMessagesRequest,
) -> ChatCompletionRequest:
    """For M3, carry `thinking.type` and the effort over to the chat request, which has the same values.

    SGLang takes M3 for a model that always thinks: it refuses `disabled`, and `enabled` changes nothing; and
    it makes `xhigh` into `max`. `budget_tokens` and `display` have no effect. Counting tokens comes this way,
    too.
    """
    if not serving.openai_serving_chat.is_minimax_m3:
        return original(serving, anthropic_request)
    thinking, output = anthropic_request.thinking, anthropic_request.output_config
    request = original(serving, anthropic_request.model_copy(update={"thinking": None}))
    if thinking is not None:
        request.thinking = {"type": thinking.type}
    if output is not None and output.effort is not None:
        request.reasoning_effort = output.effort
    return request


def after_validate_request(error: str | None, request: ChatCompletionRequest) -> str | None:
    """After SGLang's check of a chat request for M3: what is wrong with its effort, if nothing else is."""
    return error or _effort_error(request)


def after_validate_media_content(
    error: str | None, serving: OpenAIServingChat, request: ChatCompletionRequest
) -> str | None:
    """The same for the Responses endpoint, which checks the chat request that it makes for media alone."""
    return error or (_effort_error(request) if serving.is_minimax_m3 else None)


def _effort_error(request: ChatCompletionRequest) -> str | None:
    in_template = (request.chat_template_kwargs or {}).get("reasoning_effort")
    for effort in (request.reasoning_effort, in_template):
        if effort is not None and effort not in EFFORTS:
            return f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {effort!r}."
    return None


HOOKS = (
    (
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._convert_to_chat_completion_request",
        around_convert_to_chat_completion_request,
        HookType.AROUND,
    ),
    (
        "sglang.srt.entrypoints.openai.serving_chat._validate_minimax_m3_request",
        after_validate_request,
        HookType.AFTER,
    ),
    (
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._validate_media_content",
        after_validate_media_content,
        HookType.AFTER,
    ),
)
"""(target, hook, type). Each acts for M3 models only, and twice is the same as once."""
