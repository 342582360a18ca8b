"""What SGLang's endpoints get wrong on the way of a reply through the parsers to the client."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookType

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.parser.reasoning_parser import ReasoningParser


def after_reasoning_parser_init(
    result: None,
    parser: ReasoningParser,
    model_type: str | None = None,
    stream_reasoning: bool = True,
    force_reasoning: bool | None = None,
    request: ChatCompletionRequest | ResponsesRequest | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Tell M3's reasoning detector what the request declares, as SGLang tells the tool call detector."""
    from sglang_m3.parsing.reasoning import M3ReasoningDetector

    if isinstance(parser.detector, M3ReasoningDetector) and request is not None:
        parser.detector.declare(declared_functions(request))


def declared_functions(request: ChatCompletionRequest | ResponsesRequest) -> dict[str, Any]:
    """Names of the functions that a request's calls may name, and their parameter schemas."""
    from sglang.srt.entrypoints.openai.responses_adapters import custom_tool_parameters

    functions: dict[str, Any] = {}
    for holder in (request, *(getattr(request, "messages", None) or ())):
        for tool in getattr(holder, "tools", None) or ():
            function = getattr(tool, "function", tool)
            is_custom = tool.type == "custom"
            functions[function.name] = custom_tool_parameters() if is_custom else function.parameters
    return functions


async def around_generate_stream_content(
    original: Callable[..., AsyncGenerator[str, None]], serving: OpenAIServingChat, *args: Any, **kwargs: Any
) -> AsyncGenerator[str, None]:
    """For M3, put the events of one step of the engine into an order that keeps calls together.

    SGLang sends a step's thinking and text before its pieces of calls. Where a step has several tokens, as
    with drafts, a call that it ends is torn from its last arguments, and the Messages endpoint drops them.
    """
    events = [event async for event in original(serving, *args, **kwargs)]
    if serving.tool_call_parser == "minimax-m3" and len(events) > 1:
        events = in_order(events)
    for event in events:
        yield event


def in_order(events: list[str]) -> list[str]:
    """Chat completion chunks of one step: the rest of a call that was open, then text, then new calls."""
    ranks = []
    begun: set[int] = set()
    for event in events:
        choices = json.loads(event.removeprefix("data: "))["choices"]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls") or ()]
        begun.update(call["index"] for call in calls if call["function"].get("name"))
        goes_on = bool(calls) and not any(call["index"] in begun for call in calls)
        ranks.append(0 if goes_on else 2 if calls else 1)
    return [event for _, event in sorted(zip(ranks, events), key=lambda ranked: ranked[0])]


HOOKS = (
    (
        "sglang.srt.parser.reasoning_parser.ReasoningParser.__init__",
        after_reasoning_parser_init,
        HookType.AFTER,
    ),
    (
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._generate_stream_content",
        around_generate_stream_content,
        HookType.AROUND,
    ),
)
"""(target, hook, type). Each acts for M3's parsers only."""
