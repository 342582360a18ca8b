"""Puts M3's detectors where SGLang looks for `--reasoning-parser` and `--tool-call-parser`."""

from __future__ import annotations

NAME = "minimax-m3"


def register() -> None:
    """Replaces SGLang's own detectors of the name `minimax-m3`.

    Other names are left alone. May be called again. Imports SGLang's parsers, which takes seconds.
    """
    register_reasoning()
    register_tool_calls()


def register_reasoning() -> None:
    """Replaces the reasoning detector (`sglang.srt.parser.reasoning_parser.ReasoningParser.DetectorMap`)."""
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    from sglang_m3.parsing.reasoning import M3ReasoningDetector

    ReasoningParser.DetectorMap[NAME] = M3ReasoningDetector


def register_tool_calls() -> None:
    """Replaces the tool call detector (`...function_call_parser.FunctionCallParser.ToolCallParserEnum`)."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    from sglang_m3.parsing.tool_calls import M3ToolCallDetector

    FunctionCallParser.ToolCallParserEnum[NAME] = M3ToolCallDetector
