"""An answer's tokens and times are its own however its bytes arrive, and its end is seen at its end."""

from __future__ import annotations

import asyncio
import itertools

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench_serving import stream
from bench_serving.stream import Answer, Block, Connection

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: Chunked\r\n\r\n"


def events(counts: list[int]) -> list[bytes]:
    """Events after each of which so many tokens are there."""
    return [
        b"data: "
        + orjson.dumps(
            {
                "text": '0\r\n\r\n "completion_tokens": 99',
                "output_ids": list(range(count)),
                "meta_info": {"prompt_tokens": 5, "completion_tokens": count, "cached_tokens": 3},
            }
        )
        + b"\n\n"
        for count in counts
    ]


def chunked(body: bytes, cuts: list[int]) -> bytes:
    """A body as chunks that end at `cuts`."""
    places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    pieces = [body[begin:end] for begin, end in itertools.pairwise(places)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


class Wire:
    """A transport that answers a request with blocks; `seen` says after which of them the answer was over."""

    def __init__(self, connection: Connection, blocks: list[bytes], close: bool = False) -> None:
        self.connection, self.blocks, self.close_after = connection, blocks, close
        self.seen: int | None = None

    def writelines(self, parts: list[bytes]) -> None:
        asyncio.get_running_loop().call_soon(self._answer)

    def _answer(self) -> None:
        for number, block in enumerate(self.blocks):
            self.connection.data_received(block)
            if self.seen is None and self.connection._finished.done():
                self.seen = number
        if self.close_after:
            self.connection.connection_lost(None)

    def is_closing(self) -> bool:
        return False


def arrive(
    blocks: list[bytes], monkeypatch: pytest.MonkeyPatch, close: bool = False
) -> tuple[Wire, list[Block]]:
    """Feed blocks at one second each; the first arrives at second 1."""
    ticks = itertools.count(1)
    connection = Connection()
    wire = Wire(connection, blocks, close)

    async def ask() -> list[Block]:
        connection.connection_made(wire)
        return await connection.send([b"x"])

    with monkeypatch.context() as patch:
        patch.setattr(stream.time, "perf_counter", lambda: float(next(ticks)))
        return wire, asyncio.run(ask())


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    chunk_cuts=st.lists(st.integers(0, 5000), max_size=8),
    block_cuts=st.lists(st.integers(0, 5000), max_size=12),
)
def test_an_event_s_time_is_that_of_its_last_byte(
    steps: list[int], chunk_cuts: list[int], block_cuts: list[int]
) -> None:
    counts = list(itertools.accumulate(steps))
    sent = events(counts)
    raw = HEAD + chunked(b"".join(sent) + b"data: [DONE]\n\n", chunk_cuts)
    places = sorted({0, len(raw), *(cut % len(raw) for cut in block_cuts)})
    blocks = [raw[begin:end] for begin, end in itertools.pairwise(places)]
    with pytest.MonkeyPatch.context() as patch:
        wire, stored = arrive(blocks, patch)
    assert b"".join(data for _, data in stored) == raw
    assert wire.seen == len(blocks) - 1
    result = Answer(counts[-1], 0.0, stored).result
    assert result.output.success, result.output.error
    assert result.output_ids == tuple(range(counts[-1])) and result.events == len(counts)

    # By brute force: the first block with which decoding all that arrived gives the event.
    def arrived(event: int) -> float:
        for number in range(len(blocks)):
            decoded, rest = b"", b"".join(blocks[: number + 1]).partition(b"\r\n\r\n")[2]
            while b"\r\n" in rest:
                size, rest = rest.split(b"\r\n", 1)
                length = int(size, 16)
                decoded, rest = decoded + rest[:length], rest[length + 2 :]
            if len(b"".join(sent[: event + 1])) <= len(decoded):
                return float(number + 1)
        raise AssertionError(event)

    times = [arrived(event) for event in range(len(counts))]
    gaps = [
        (later - earlier) / new
        for (earlier, later), new in zip(itertools.pairwise(times), steps[1:])
        for _ in range(new)
    ]
    assert result.output.ttft == times[0]
    assert result.output.itl == pytest.approx(gaps)
    assert result.output.latency == times[-1]


PLAIN = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 9\r\n\r\n"
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def test_an_answer_with_a_length_ends_there(monkeypatch: pytest.MonkeyPatch) -> None:
    wire, stored = arrive([PLAIN[:20], PLAIN[20:] + b"too", b" bu", b"sy\n"], monkeypatch)
    assert wire.seen == 3
    answer = Answer(7, 0.0, stored)
    assert not answer.looks_complete
    assert answer.result.output.error == "HTTP 503: too busy\n"


def test_an_answer_without_one_ends_with_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = events([1, 2])
    wire, stored = arrive([UNTIL_CLOSED + sent[0], sent[1]], monkeypatch, close=True)
    assert wire.seen is None
    result = Answer(2, 0.0, stored).result
    assert result.output.success and result.output.itl == [1.0]


@pytest.mark.parametrize("kept", [0, 30, len(HEAD) + 40])
def test_a_connection_that_ends_too_early_is_an_error(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = HEAD + chunked(b"".join(events([1, 2])), [])
    with pytest.raises(ConnectionError, match="before its answer was complete"):
        arrive([raw[:kept]] if kept else [], monkeypatch, close=True)


NO_ANSWERS = {
    "no meta_info": (b'data: {"output_ids": [1]}\n\n', "KeyError('meta_info')"),
    "no output_ids": (b'data: {"meta_info": {"prompt_tokens": 1, "completion_tokens": 1}}\n\n', "output_ids"),
    "no JSON": (b"data: well\n\n", "JSONDecodeError"),
    "no event": (b"data: [DONE]\n\n", "no event"),
}


@pytest.mark.parametrize(("body", "message"), NO_ANSWERS.values(), ids=NO_ANSWERS)
def test_what_is_no_answer_of_generate_is_a_failure_that_says_so(body: bytes, message: str) -> None:
    output = Answer(1, 0.0, [(1.0, HEAD + chunked(body, []))]).result.output
    assert not output.success
    assert "no answer of /generate" in output.error and message in output.error
