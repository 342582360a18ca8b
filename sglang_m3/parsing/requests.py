"""What SGLang's endpoints get wrong in requests for M3's thinking."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.plugins.hook_registry import HookType

if TYPE_CHECKING:
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""`none` and `minimal` turn thinking off; SGLang drops every other value without a word."""


def around_convert_to_chat_completion_request(
    original: Callable[[AnthropicServing, AnthropicMessagesRequest], ChatCompletionRequest],
    serving: AnthropicServing,
    anthropic_request: AnthropicMessagesRequest,
) -> ChatCompletionRequest:
    """For M3, carry `thinking.type` over to the chat request, which has the same modes.

    SGLang takes M3 for a model that always thinks: it refuses `disabled`, and `enabled` changes nothing.
    `budget_tokens` and `display` have no effect. Counting tokens comes this way, too.
    """
    thinking = anthropic_request.thinking
    if thinking is None or not serving.openai_serving_chat.is_minimax_m3:
        return original(serving, anthropic_request)
    request = original(serving, anthropic_request.model_copy(update={"thinking": None}))
    request.thinking = {"type": thinking.type}
    return request


def after_validate_request(error: str | None, request: ChatCompletionRequest) -> str | None:
    """After SGLang's check of a chat request for M3: what is wrong with its effort, if nothing else is."""
    in_template = (request.chat_template_kwargs or {}).get("reasoning_effort")
    for effort in (request.reasoning_effort, in_template):
        if error is None and effort is not None and effort not in EFFORTS:
            return f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {effort!r}."
    return error


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
)
"""(target, hook, type). Each acts for M3 models only, and twice is the same as once."""
