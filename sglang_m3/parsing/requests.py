"""What SGLang's endpoints get wrong in requests for M3's thinking and in turns that requests give back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.configs.model_config import is_minimax_sparse
from sglang.srt.plugins.hook_registry import HookType

if TYPE_CHECKING:
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""`none` and `minimal` turn thinking off; SGLang drops every other value without a word."""


def after_serving_chat_init(result: None, serving: OpenAIServingChat, *args: Any, **kwargs: Any) -> None:
    """Hold M3 without its vision half to the same contract; SGLang goes by the `model_type` of the whole."""
    serving.is_minimax_m3 = is_minimax_sparse(serving.tokenizer_manager.model_config.hf_config)


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


def after_supports_native_reasoning_history(result: bool, serving: OpenAIServingChat) -> bool:
    """For M3, thinking given back to the Messages endpoint goes to the chat template as it is.

    SGLang writes it into the text between M3's markers, with a line break that the model did not write: the
    cache would end there.
    """
    return result or (serving.is_minimax_m3 and serving._template_reads_reasoning_content)


def after_construct_input_messages(
    messages: list[Any], serving: OpenAIServingResponses, *args: Any, **kwargs: Any
) -> list[Any]:
    """For M3, make one turn of what the Responses endpoint lists as its thinking, text and calls.

    SGLang puts text with a `phase`, which it gives text before calls itself, into a turn of its own. It also
    puts `instructions` before a leading root message.
    """
    if not serving.is_minimax_m3:
        return messages
    turns = [
        {name: value for name, value in message.items() if name != "phase"}
        if message.get("role") == "assistant"
        else message
        for message in messages
    ]
    turns = serving._merge_consecutive_assistant_messages(turns)
    roles = [turn.get("role") for turn in turns[:2]]
    return [turns[1], turns[0], *turns[2:]] if roles == ["system", "root"] else turns


HOOKS = (
    (
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat.__init__",
        after_serving_chat_init,
        HookType.AFTER,
    ),
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
    (
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat.supports_native_reasoning_history",
        after_supports_native_reasoning_history,
        HookType.AFTER,
    ),
    (
        "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses._construct_input_messages",
        after_construct_input_messages,
        HookType.AFTER,
    ),
)
"""(target, hook, type). Each acts for M3 models only, and twice is the same as once."""
