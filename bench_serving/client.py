"""Sends sessions to a server's `/generate` and times every token of the stream.

Requests and results are SGLang's (`sglang.benchmark.serving.RequestFuncOutput`), so its metrics apply. The
request function is our own for three reasons: its text-based count misses tokens that decode to no text, as
random weights produce; a session needs the ids it generated; and one connection pool for the whole run
costs less than a client per request.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import aiohttp
import orjson
import uvloop
from sglang.benchmark.serving import RequestFuncOutput

from bench_serving.sessions import Session

COUNT = b'"completion_tokens":'
TIMEOUT_SECONDS = 6 * 3600
READ_BUFFER_BYTES = 10 << 20


@dataclass(frozen=True)
class Exchange:
    """One request and its answer.

    Attributes:
        session, turn, branch: which one; the same in every variant.
        output: SGLang's record: success, error, times in seconds, tokens, cached tokens.
        output_ids: the tokens generated.
    """

    session: int
    turn: int
    branch: int
    output: RequestFuncOutput
    output_ids: tuple[int, ...]


@dataclass(frozen=True)
class Drive:
    """What a run of the client saw.

    Attributes:
        exchanges: in the order of their keys.
        seconds: wall time from the first request to the last answer.
        client_cpu_seconds: CPU time of this process meanwhile.
    """

    exchanges: tuple[Exchange, ...]
    seconds: float
    client_cpu_seconds: float


def drive(
    url: str,
    sessions: Iterable[Session],
    concurrency: int,
    *,
    on_answer: Callable[[Exchange], None] = lambda exchange: None,
) -> Drive:
    """Run all sessions, `concurrency` at a time. A failed request is an exchange like any other; what its
    session had still to ask is recorded as failed, too."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, _no_garbage_collection():
        return runner.run(_drive(url, sessions, concurrency, on_answer))


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection walks all that SGLang's modules hold: hundreds of milliseconds without a timestamp."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def _drive(
    url: str, sessions: Iterable[Session], concurrency: int, on_answer: Callable[[Exchange], None]
) -> Drive:
    sessions = tuple(sessions)
    # Long prompts take milliseconds to encode, in which no answer is read: done before the clock starts.
    openings: dict[int, bytes] = {}
    for session in sessions:
        if id(session.opening) not in openings:
            openings[id(session.opening)] = _encoded(session.opening)
    waiting = iter([(session, openings[id(session.opening)]) for session in sessions])
    exchanges: list[Exchange] = []

    def done(exchange: Exchange) -> None:
        exchanges.append(exchange)
        on_answer(exchange)

    client = aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=READ_BUFFER_BYTES,
    )
    async with client:
        begin, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(_slot(client, url, waiting, done) for _ in range(concurrency)))
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    exchanges.sort(key=lambda exchange: (exchange.session, exchange.turn, exchange.branch))
    return Drive(tuple(exchanges), seconds, cpu)


async def _slot(
    client: aiohttp.ClientSession,
    url: str,
    waiting: Iterator[tuple[Session, bytes]],
    done: Callable[[Exchange], None],
) -> None:
    """One place in flight: takes sessions until none is left."""
    for session, so_far in waiting:
        lost = ""
        for number, turn in enumerate(session.turns):
            if turn.think_seconds and not lost:
                await asyncio.sleep(turn.think_seconds)
            answers = [
                _not_sent(lost) if lost else _send(client, url, _join(so_far, branch), turn.output_tokens)
                for branch in turn.branches
            ]
            results = await asyncio.gather(*answers)
            for branch, (output, ids) in enumerate(results):
                done(Exchange(session.key, number, branch, output, ids))
            failed = [output.error for output, _ in results if not output.success]
            if failed and not lost:
                lost = f"not sent: an earlier turn of the session failed: {failed[0][:200]}"
            so_far = _join(_join(so_far, turn.branches[0]), results[0][1])


async def _not_sent(reason: str) -> tuple[RequestFuncOutput, tuple[int, ...]]:
    return RequestFuncOutput(error=reason, start_time=time.perf_counter()), ()


def _encoded(ids: tuple[int, ...]) -> bytes:
    """Token ids as the inside of a JSON list."""
    return orjson.dumps(ids)[1:-1]


def _join(so_far: bytes, ids: tuple[int, ...]) -> bytes:
    return b",".join(filter(None, (so_far, _encoded(ids))))


def request_body(prompt: bytes, output_tokens: int) -> bytes:
    """The JSON of a greedy request for exactly `output_tokens` tokens after the prompt, an encoded list."""
    sampling = {
        "max_new_tokens": output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    rest = orjson.dumps({"sampling_params": sampling, "stream": True})
    return b"".join((b'{"input_ids":[', prompt, b"],", rest[1:]))


async def _send(
    client: aiohttp.ClientSession, url: str, prompt: bytes, output_tokens: int
) -> tuple[RequestFuncOutput, tuple[int, ...]]:
    output = RequestFuncOutput()
    body = request_body(prompt, output_tokens)
    output.start_time = time.perf_counter()
    stream = _Stream(output)
    # Whatever goes wrong with a request is a result: counted and shown, and the others go on.
    try:
        async with client.post(
            f"{url}/generate", data=body, headers={"Content-Type": "application/json"}
        ) as response:
            if response.status != 200:
                output.error = f"HTTP {response.status}: {(await response.text())[:2000]}"
                return output, ()
            async for block in response.content.iter_any():
                stream.feed(block)
        return output, stream.close(output_tokens)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        output.success = False
        output.error = traceback.format_exc()
        return output, ()


class _Stream:
    """Reads server-sent events as they arrive; parses only the token count of each until the stream ends."""

    def __init__(self, output: RequestFuncOutput) -> None:
        self.output = output
        self._last_seconds = output.start_time
        self._rest = b""
        self._count = 0
        self._events: list[bytes] = []

    def feed(self, block: bytes) -> None:
        """Take in what has just arrived."""
        now = time.perf_counter()
        *events, self._rest = (self._rest + block).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                continue
            self._events.append(data)
            place = data.rfind(COUNT)
            if place < 0:
                continue
            begin = place + len(COUNT)
            count = int(data[begin : begin + 12].split(b",")[0].split(b"}")[0])
            new = count - self._count
            if new <= 0:
                continue
            if self._count == 0:
                self.output.ttft = now - self.output.start_time
            else:
                # As SGLang's client has it: tokens that arrive together share the gap.
                self.output.itl.extend([(now - self._last_seconds) / new] * new)
            self._count, self._last_seconds = count, now

    def close(self, wanted: int) -> tuple[int, ...]:
        """Complete `output` and return the generated ids; an answer of not `wanted` tokens is a failure."""
        output = self.output
        last = orjson.loads(self._events[-1]) if self._events else {"error": "the stream held nothing"}
        if "error" in last:
            output.error = str(last["error"])
            return ()
        meta = last["meta_info"]
        output.latency = self._last_seconds - output.start_time
        output.output_len = self._count
        output.prompt_len = meta["prompt_tokens"]
        output.cached_tokens = meta.get("cached_tokens", 0)
        ids = last["output_ids"]
        if len(ids) != self._count:
            # With --incremental-streaming-output every event holds its own tokens alone.
            ids = [token for event in self._events for token in orjson.loads(event)["output_ids"]]
        output.success = self._count == len(ids) == wanted
        if not output.success:
            output.error = f"{self._count} of {wanted} tokens, finish reason {meta.get('finish_reason')}"
        return tuple(ids)
