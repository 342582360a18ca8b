"""Calls that a request forces, where the prompt leaves it to the model to think first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.plugins.hook_registry import HookType

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, MessageProcessingResult
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat


def after_process_messages(
    result: MessageProcessingResult,
    serving: OpenAIServingChat,
    request: ChatCompletionRequest,
    is_multimodal: bool,
    *,
    output_constrained: bool = False,
) -> None:
    """For M3, let a forced call come after thinking that the model opens, or declines, itself.

    SGLang knows two prompts: one that ends inside thinking, whose end its grammar waits for, and one after
    which a forced call must come at once. An adaptive prompt is neither.
    """
    choice = request.tool_choice
    mode = (request.chat_template_kwargs or {}).get("thinking_mode", "adaptive")
    if not serving.is_minimax_m3 or mode != "adaptive" or choice in ("auto", "none"):
        return
    if result.tool_call_constraint is None or serving.tool_call_parser != "minimax-m3":
        return
    from sglang_m3.parsing.tool_calls import M3ToolCallDetector

    tag = M3ToolCallDetector().get_structural_tag(
        serving._effective_tools(request), choice, "auto", request.parallel_tool_calls
    )
    result.tool_call_constraint = ("structural_tag", tag)


HOOKS = (
    (
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._process_messages",
        after_process_messages,
        HookType.AFTER,
    ),
)
"""(target, hook, type). Acts for M3 models only, and twice is the same as once."""
