"""SGLang's reasoning detector for M3."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sglang.srt.parser.reasoning_parser import BaseReasoningFormatDetector, StreamingParseResult

from sglang_m3.parsing.events import Event, Reasoning
from sglang_m3.parsing.markup import THINK_CLOSE, THINK_OPEN
from sglang_m3.parsing.parser import ThinkingReader


class M3ReasoningDetector(BaseReasoningFormatDetector):
    """Parts a reply's thinking from the rest, which keeps the markup of calls for the tool call detector.

    Args:
        stream_reasoning: False holds thinking back until it pauses or the reply ends.
        force_reasoning: whether the prompt ends with the opening marker, as `thinking_mode` `enabled` has it.
        continue_final_message: the reply goes on from `previous_content`, so it starts in whatever state that
            left. Nothing else of the prompt is looked at.
        previous_content: text of the message that goes on; content that is not text leaves no state.
        force_nonempty_content: a reply of nothing but thinking becomes content.

    One detector reads one reply (contract: `sglang.srt.parser.reasoning_parser.BaseReasoningFormatDetector`).
    """

    def __init__(
        self,
        stream_reasoning: bool = True,
        force_reasoning: bool = False,
        continue_final_message: bool = False,
        previous_content: Any = "",
        force_nonempty_content: bool = False,
    ) -> None:
        super().__init__(
            THINK_OPEN,
            THINK_CLOSE,
            force_reasoning=force_reasoning,
            stream_reasoning=stream_reasoning,
            force_nonempty_content=force_nonempty_content,
        )
        self._starts_thinking = force_reasoning
        self._previous = previous_content if continue_final_message else ""
        self.declare({})
        self._held: list[str] = []
        """Thinking not yet passed on, because of `stream_reasoning`."""
        self._thought: list[str] = []
        """All thinking so far, where it may have to become content."""
        self._has_content = False

    def declare(self, functions: Mapping[str, Any]) -> None:
        """Before the first text: the request's functions and their parameter schemas.

        Without them a marker in an argument may be taken for one of the reply.
        """
        self._functions = functions
        self._reader = self._new_reader()

    def _new_reader(self) -> ThinkingReader:
        thinking = self._starts_thinking
        if self._previous and isinstance(self._previous, str):
            before = ThinkingReader(self._functions, thinking=thinking)
            before.feed(self._previous)
            thinking = before.thinking
        return ThinkingReader(self._functions, thinking=thinking)

    def get_self_opened_think_start_token_ids(self, tokenizer: Any) -> list[int]:
        """The opening marker, which the model writes itself when it chooses to think."""
        return tokenizer.encode(self.think_start_token, add_special_tokens=False)

    def detect_and_parse(self, text: str) -> StreamingParseResult:
        reader = self._new_reader()
        return self._maybe_apply_force_nonempty_content(_parted([*reader.feed(text), *reader.close()]))

    def parse_streaming_increment(self, new_text: str) -> StreamingParseResult:
        return self._streamed(_parted(self._reader.feed(new_text)), thinking=self._reader.thinking)

    def finish(self) -> StreamingParseResult:
        result = self._streamed(_parted(self._reader.close()), thinking=False)
        if self._force_nonempty_content and not self._has_content:
            return StreamingParseResult(normal_text="".join(self._thought))
        return result

    def _streamed(self, result: StreamingParseResult, *, thinking: bool) -> StreamingParseResult:
        self._has_content |= bool(result.normal_text)
        if self._force_nonempty_content and result.reasoning_text:
            self._thought.append(result.reasoning_text)
        if not self.stream_reasoning:
            self._held.append(result.reasoning_text)
            result.reasoning_text = "" if thinking else "".join(self._held)
            self._held = self._held if thinking else []
        return result


def _parted(events: Iterable[Event]) -> StreamingParseResult:
    reasoning: list[str] = []
    content: list[str] = []
    for event in events:
        (reasoning if isinstance(event, Reasoning) else content).append(event.text)
    return StreamingParseResult(normal_text="".join(content), reasoning_text="".join(reasoning))
