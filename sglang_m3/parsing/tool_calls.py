"""SGLang's tool call detector for M3."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from sglang.srt.entrypoints.openai.protocol import Tool, ToolChoice
from sglang.srt.environ import envs
from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.core_types import StreamingParseResult, ToolCallItem, _GetInfoFunc

from sglang_m3.parsing.events import CallArguments, CallEnd, CallStart, Content, Event
from sglang_m3.parsing.markup import CALL_OPEN, NAMESPACE
from sglang_m3.parsing.parser import CallReader
from sglang_m3.parsing.structural_tag import constrain_parameters


class M3ToolCallDetector(BaseFormatDetector):
    """Reads calls from what the reasoning detector left, or from a whole reply if there is none.

    Calls are numbered through the reply, streaming or not. A call to a function that the request does not
    declare is passed on if the request declares none or SGLANG_FORWARD_UNKNOWN_TOOLS is set; else its source
    is content.

    Whitespace after a call comes with the text that follows it: the Responses endpoint drops it alone.

    A call that the reply cuts off: streaming has passed on what there was of it, and
    `incomplete_tool_call_indices` names it, which keeps the server from reporting `tool_calls` as the reason
    to stop. Read as a whole, its source is content, because a listed call there counts as complete.

    One detector reads one reply (`sglang.srt.function_call.base_format_detector.BaseFormatDetector`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.bot_token = NAMESPACE + CALL_OPEN
        self.incomplete_tool_call_indices: set[int] = set()
        self._reader: CallReader | None = None
        self._whitespace = ""
        """What came after a call and waits for text."""
        self._text_follows = True
        """Whether text has come since the last call."""

    def has_tool_call(self, text: str) -> bool:
        """Whether `text` may hold a call: the namespace does not occur otherwise."""
        return NAMESPACE in text

    @classmethod
    def parses_without_tools(cls) -> bool:
        return True

    def detect_and_parse(self, text: str, tools: list[Tool]) -> StreamingParseResult:
        reader = _reader(tools)
        events = [*reader.feed(text), *reader.close()]
        if reader.open_call is None:
            return _result(events)
        begun = max(at for at, event in enumerate(events) if isinstance(event, CallStart))
        return _result([*events[:begun], Content(text[reader.open_call :])])

    def parse_streaming_increment(self, new_text: str, tools: list[Tool]) -> StreamingParseResult:
        if self._reader is None:
            self._reader = _reader(tools)
        return self._streamed(self._reader.feed(new_text))

    def finish(self, tools: list[Tool]) -> StreamingParseResult:
        result = self._streamed(self._reader.close() if self._reader is not None else [])
        result.normal_text += self._whitespace
        return result

    def _streamed(self, events: Iterable[Event]) -> StreamingParseResult:
        content, self._whitespace = self._whitespace, ""
        calls = []
        for event in events:
            if isinstance(event, CallStart):
                self.incomplete_tool_call_indices.add(event.index)
                calls.append(ToolCallItem(tool_index=event.index, name=event.name, parameters=""))
            elif isinstance(event, CallArguments):
                calls.append(ToolCallItem(tool_index=event.index, parameters=event.json_delta))
            elif isinstance(event, CallEnd):
                self.incomplete_tool_call_indices.discard(event.index)
                self._text_follows = False
            elif isinstance(event, Content):
                content += event.text
                self._text_follows = self._text_follows or not event.text.isspace()
        if content.isspace() and not self._text_follows:
            content, self._whitespace = "", content
        return StreamingParseResult(normal_text=content, calls=calls)

    def supports_structural_tag(self) -> bool:
        """Calls that a request forces come in M3's own format, and this detector reads them."""
        return True

    def structure_info(self) -> _GetInfoFunc:
        """Not for M3: SGLang's older tags hold JSON arguments.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("MiniMax-M3 has a structural tag of its own")

    def get_structural_tag_name(self) -> str:
        return "minimax_m3"

    def get_structural_tag(
        self,
        tools: list[Tool] | None = None,
        tool_choice: ToolChoice | Literal["auto", "required"] = "auto",
        thinking_mode: bool | Literal["auto"] = False,
        parallel_tool_calls: bool = True,
    ) -> Any:
        """xgrammar's M3 tag for these tools; arguments follow their schemas, strict or not.

        `thinking_mode`: whether the reply starts inside thinking, or `auto` where the model may think first.
        The tag does not know unconstrained arguments (`sglang_m3.parsing.structural_tag`).
        """
        constrained = []
        for tool in tools or []:
            parameters = constrain_parameters(tool.function.parameters)
            function = tool.function.model_copy(update={"strict": True, "parameters": parameters})
            constrained.append(tool.model_copy(update={"function": function}))
        return super().get_structural_tag(constrained, tool_choice, thinking_mode, parallel_tool_calls)


def _reader(tools: list[Tool]) -> CallReader:
    functions = {tool.function.name: tool.function.parameters for tool in tools if tool.function.name}
    undeclared = not functions or envs.SGLANG_FORWARD_UNKNOWN_TOOLS.get()
    return CallReader(functions, undeclared=undeclared)


def _result(events: Iterable[Event]) -> StreamingParseResult:
    """All text, and every call with its arguments."""
    content: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for event in events:
        if isinstance(event, CallStart):
            names.append(event.name)
            arguments.append([])
        elif isinstance(event, CallArguments):
            arguments[event.index].append(event.json_delta)
        elif isinstance(event, Content):
            content.append(event.text)
    calls = [
        ToolCallItem(tool_index=index, name=name, parameters="".join(deltas))
        for index, (name, deltas) in enumerate(zip(names, arguments))
    ]
    return StreamingParseResult(normal_text="".join(content), calls=calls)
