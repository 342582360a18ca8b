"""One streamed answer over HTTP/1.1: bytes and their times of arrival while it runs, tokens afterwards.

The load generator's cost is that of waking up for every token (`bench_serving.client_cost`). So nothing is
decoded while requests run: a block of bytes is stored with its time, and its last bytes say whether the
answer is over.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import orjson
from sglang.benchmark.serving import RequestFuncOutput

LAST_CHUNK = b"\r\n0\r\n\r\n"
HEAD_END = b"\r\n\r\n"
COUNT = b'"completion_tokens":'
DONE = b"[DONE]"
SHOWN_BYTES = 2000

Block = tuple[float, bytes]
"""Bytes as they were read, and when (`time.perf_counter`)."""


class Connection(asyncio.Protocol):
    """One request at a time; may be used again while `reusable`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._blocks: list[Block] = []
        self._finished: asyncio.Future[None] | None = None
        self._chunked = False
        self._until_closed = False
        self.free_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    @property
    def reusable(self) -> bool:
        """Whether the server left the connection open after the last answer."""
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, parts: Sequence[bytes]) -> list[Block]:
        """Send a whole request and return its answer.

        Raises:
            ConnectionError: the connection ended before the answer did.
        """
        assert self._finished is None and self._transport is not None, "one request at a time"
        self._blocks, self._chunked, self._until_closed = [], False, False
        self._finished = asyncio.get_running_loop().create_future()
        self._transport.writelines(parts)
        try:
            await self._finished
        finally:
            self._finished = None
        self.free_since = time.perf_counter()
        return self._blocks

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._blocks.append((time.perf_counter(), data))
        # A block that completes the last chunk ends so, unless it is shorter.
        if not self._chunked or data.endswith(HEAD_END) or len(data) < len(HEAD_END):
            self._end_if_complete()

    def connection_lost(self, exception: Exception | None) -> None:
        self._transport = None
        if self._finished is not None and not self._finished.done():
            if self._until_closed and exception is None:
                self._finished.set_result(None)
            else:
                reason = f"the server closed the connection before its answer was complete: {exception}"
                self._finished.set_exception(ConnectionError(reason))

    def _end_if_complete(self) -> None:
        """Whether the answer is whole, known from its end if it comes in chunks and else from its length."""
        if self._finished is None or self._finished.done():
            return
        if self._chunked:
            tail = b"".join(data for _, data in self._blocks[-len(LAST_CHUNK) :])
            complete = tail.endswith(LAST_CHUNK)
        else:
            raw = b"".join(data for _, data in self._blocks)
            head, separator, body = raw.partition(HEAD_END)
            if not separator:
                return
            headers = _headers(head)
            self._chunked = headers.get(b"transfer-encoding") == b"chunked"
            self._until_closed = not self._chunked and b"content-length" not in headers
            if self._chunked:
                complete = raw.endswith(LAST_CHUNK)
            else:
                complete = not self._until_closed and len(body) >= int(headers[b"content-length"])
        if complete:
            self._finished.set_result(None)


@dataclass(frozen=True)
class Event:
    """A server-sent event's data, and when its last byte arrived (`time.perf_counter`)."""

    seconds: float
    data: bytes


@dataclass(frozen=True)
class Result:
    """What an answer says.

    Attributes:
        output: SGLang's record: success, error, times in seconds, tokens, cached tokens.
        output_ids: the tokens generated.
        events: streamed, each of them a wake-up of the client at most.
    """

    output: RequestFuncOutput
    output_ids: tuple[int, ...] = ()
    events: int = 0


@dataclass(frozen=True)
class Answer:
    """A request and the bytes that answered it.

    Attributes:
        wanted_tokens: asked for; any other number is a failure.
        start_seconds: when the request was sent (`time.perf_counter`).
        blocks: the answer as it arrived.
        lost: why there is none, or not all of it; empty if there is.
    """

    wanted_tokens: int
    start_seconds: float
    blocks: list[Block] = field(default_factory=list)
    lost: str = ""

    @property
    def looks_complete(self) -> bool:
        """Whether it is an answer with all its bytes, by its first and last bytes alone."""
        return not self.lost and bool(self.blocks) and b" 200 " in self.blocks[0][1][:16]

    @functools.cached_property
    def result(self) -> Result:
        """Read when it is first asked for."""
        output = RequestFuncOutput(start_time=self.start_seconds)
        if self.lost:
            output.error = self.lost
            return Result(output)
        try:
            return self._read(output)
        except (ValueError, KeyError) as error:
            output.success = False
            output.error = f"this is no answer of /generate: {error!r}"
            return Result(output)

    def _read(self, output: RequestFuncOutput) -> Result:
        """Raises ValueError and KeyError for bytes that are no answer of `/generate`."""
        raw = b"".join(data for _, data in self.blocks)
        status = raw.split(b" ", 2)[1]
        if status != b"200":
            body = b"".join(data for _, data in _chunks(raw))
            output.error = f"HTTP {status.decode()}: {body[:SHOWN_BYTES].decode(errors='replace')}"
            return Result(output)
        events = [event for event in self._events(raw) if event.data != DONE]
        if not events:
            raise ValueError("it holds no event")
        count = _time_tokens(output, events)
        last = orjson.loads(events[-1].data)
        if "error" in last:
            output.error = str(last["error"])
            return Result(output, events=len(events))
        meta, ids = last["meta_info"], last["output_ids"]
        output.output_len = count
        output.prompt_len = meta["prompt_tokens"]
        output.cached_tokens = meta.get("cached_tokens", 0)
        if len(ids) != count:
            # With --incremental-streaming-output every event holds its own tokens alone.
            ids = [token for event in events for token in orjson.loads(event.data)["output_ids"]]
        output.success = count == len(ids) == self.wanted_tokens
        if not output.success:
            output.error = (
                f"{count} of {self.wanted_tokens} tokens, finish reason {meta.get('finish_reason')}"
            )
        return Result(output, tuple(ids), len(events))

    def _events(self, raw: bytes) -> Iterator[Event]:
        """The stream's events in order; what follows the last empty line is none."""
        ends = list(itertools.accumulate(len(data) for _, data in self.blocks))
        block, rest = 0, b""
        for place, data in _chunks(raw):
            offset = place - len(rest)
            text = rest + data
            begin = 0
            while (end := text.find(b"\n\n", begin)) >= 0:
                while ends[block] < offset + end + 2:
                    block += 1
                yield Event(self.blocks[block][0], text[begin:end].removeprefix(b"data: "))
                begin = end + 2
            rest = text[begin:]


def _time_tokens(output: RequestFuncOutput, events: Sequence[Event]) -> int:
    """Fill in `output`'s times; returns the number of tokens."""
    tokens, last_seconds = 0, output.start_time
    for event in events:
        place = event.data.rfind(COUNT)
        if place < 0:
            continue
        begin = place + len(COUNT)
        count = int(event.data[begin : begin + 12].split(b",")[0].split(b"}")[0])
        new = count - tokens
        if new <= 0:
            continue
        if tokens == 0:
            output.ttft = event.seconds - output.start_time
        else:
            # As SGLang's client has it: tokens that arrive together share the gap.
            output.itl.extend([(event.seconds - last_seconds) / new] * new)
        tokens, last_seconds = count, event.seconds
    output.latency = last_seconds - output.start_time
    return tokens


def _chunks(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Data of each chunk of a body, with its place in `raw`; all of it if it does not come in chunks."""
    head, _, body = raw.partition(HEAD_END)
    place = len(head) + len(HEAD_END)
    if _headers(head).get(b"transfer-encoding") != b"chunked":
        yield place, body
        return
    while (line := raw.find(b"\r\n", place)) >= 0:
        size = int(raw[place:line].split(b";")[0], 16)
        begin = line + 2
        if size == 0:
            return
        yield begin, raw[begin : begin + size]
        place = begin + size + 2


def _headers(head: bytes) -> dict[bytes, bytes]:
    """Names and values of an answer's head, in small letters."""
    pairs = (line.partition(b":") for line in head.lower().split(b"\r\n")[1:])
    return {name.strip(): value.strip() for name, _, value in pairs}
