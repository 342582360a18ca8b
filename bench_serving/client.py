"""Sends sessions to a server's `/generate` and times every token of the streams.

Requests and results are SGLang's (`sglang.benchmark.serving.RequestFuncOutput`), so its metrics apply. The
request function is our own for three reasons: its text-based count misses tokens that decode to no text, as
random weights produce; a session needs the ids it generated; and it decodes every event when it arrives,
which costs several times what storing it does (`bench_serving.client_cost` measures ours). Prompts are
encoded before the clock starts and answers read after it has stopped, but for those that a session's next
turn holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import orjson
import uvloop
from sglang.benchmark.serving import RequestFuncOutput

from bench_serving.sessions import Session
from bench_serving.stream import Answer, Connection

TIMEOUT_SECONDS = 6 * 3600
IDLE_LIMIT_SECONDS = 1.0
"""A connection unused for longer is not used again: the server closes it after some seconds, maybe now."""


@dataclass(frozen=True)
class Exchange:
    """One request and its answer.

    Attributes:
        session, turn, branch: which one; the same in every variant.
        output: SGLang's record: success, error, times in seconds, tokens, cached tokens.
        output_ids: the tokens generated.
        events: streamed.
    """

    session: int
    turn: int
    branch: int
    output: RequestFuncOutput
    output_ids: tuple[int, ...]
    events: int = 0


@dataclass(frozen=True)
class Drive:
    """What a run of the client saw.

    Attributes:
        exchanges: in the order of their keys.
        seconds: wall time from the first request to the last answer.
        client_cpu_seconds: CPU time meanwhile of the thread that sends, receives and keeps the time.
        process_cpu_seconds: CPU time meanwhile of the whole process, sampling of memory included.
    """

    exchanges: tuple[Exchange, ...]
    seconds: float
    client_cpu_seconds: float
    process_cpu_seconds: float

    @property
    def events(self) -> int:
        """Streamed in all."""
        return sum(exchange.events for exchange in self.exchanges)


@dataclass(frozen=True)
class _Prepared:
    """A session with its token ids as the insides of JSON lists, and the ends of its requests' bodies."""

    session: Session
    opening: bytes
    branches: tuple[tuple[bytes, ...], ...]
    ends: tuple[bytes, ...]


def drive(
    url: str,
    sessions: Iterable[Session],
    concurrency: int,
    *,
    on_answer: Callable[[Answer], None] = lambda answer: None,
    until: float = float("inf"),
) -> Drive:
    """Run all sessions, `concurrency` at a time. A failed request is an exchange like any other; what its
    session had still to ask is recorded as failed, too. `on_answer` is in the time: it must not read.
    Requests that are not answered at `until`, on `time.monotonic`'s clock, fail."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, _no_garbage_collection():
        return runner.run(_drive(url, sessions, concurrency, on_answer, until))


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection walks all that SGLang's modules hold: hundreds of milliseconds without a timestamp."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def _drive(
    url: str,
    sessions: Iterable[Session],
    concurrency: int,
    on_answer: Callable[[Answer], None],
    until: float,
) -> Drive:
    waiting = iter(_prepared(sessions))
    answers: dict[tuple[int, int, int], Answer] = {}
    client = _Client(url, on_answer, until)
    begin, cpu, process = time.perf_counter(), time.thread_time(), time.process_time()
    await asyncio.gather(*(_slot(client, waiting, answers) for _ in range(concurrency)))
    seconds, cpu = time.perf_counter() - begin, time.thread_time() - cpu
    process = time.process_time() - process
    client.close()
    results = ((place, answer.result) for place, answer in sorted(answers.items()))
    exchanges = (Exchange(*place, one.output, one.output_ids, one.events) for place, one in results)
    return Drive(tuple(exchanges), seconds, cpu, process)


def _prepared(sessions: Iterable[Session]) -> list[_Prepared]:
    """Long prompts take milliseconds to encode, in which no answer is read."""
    openings: dict[int, bytes] = {}
    made = []
    for session in sessions:
        if id(session.opening) not in openings:
            openings[id(session.opening)] = _encoded(session.opening)
        made.append(
            _Prepared(
                session,
                openings[id(session.opening)],
                tuple(tuple(map(_encoded, turn.branches)) for turn in session.turns),
                tuple(_end_of_body(turn.output_tokens) for turn in session.turns),
            )
        )
    return made


async def _slot(
    client: _Client, waiting: Iterator[_Prepared], answers: dict[tuple[int, int, int], Answer]
) -> None:
    """One place in flight: takes sessions until none is left."""
    for prepared in waiting:
        session, so_far, lost = prepared.session, [prepared.opening], ""
        for number, (turn, branches) in enumerate(zip(session.turns, prepared.branches)):
            if turn.think_seconds and not lost:
                await asyncio.sleep(turn.think_seconds)
            if lost:
                given = [Answer(turn.output_tokens, time.perf_counter(), lost=lost) for _ in branches]
            else:
                end = prepared.ends[number]
                sent = (client.ask([*so_far, branch], end, turn.output_tokens) for branch in branches)
                given = await asyncio.gather(*sent)
            for branch, answer in enumerate(given):
                answers[session.key, number, branch] = answer
                client.on_answer(answer)
            if number + 1 < len(session.turns) and not lost:
                failed = [answer.result.output.error for answer in given if not answer.result.output.success]
                if failed:
                    lost = f"not sent: an earlier turn of the session failed: {failed[0][:200]}"
                so_far += [branches[0], _encoded(given[0].result.output_ids)]


class _Client:
    """Asks one server, over as many connections as there are requests in flight."""

    def __init__(self, url: str, on_answer: Callable[[Answer], None], until: float) -> None:
        parsed = urllib.parse.urlsplit(url)
        self.on_answer = on_answer
        self._until = until
        self._secure = parsed.scheme == "https"
        self._host, self._port = parsed.hostname, parsed.port or (443 if self._secure else 80)
        self._head = (
            f"POST {parsed.path.rstrip('/')}/generate HTTP/1.1\r\nHost: {parsed.netloc}\r\n"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: "
        ).encode()
        self._free: list[Connection] = []

    async def ask(self, prompt: list[bytes], end_of_body: bytes, output_tokens: int) -> Answer:
        """One request. Whatever goes wrong with it is a result: counted and shown, and the others go on."""
        body = [b'{"input_ids":[', *_with_commas(prompt), end_of_body]
        head = b"%b%d\r\n\r\n" % (self._head, sum(map(len, body)))
        begin = time.perf_counter()
        connection = None
        limit = min(TIMEOUT_SECONDS, self._until - time.monotonic())
        try:
            async with asyncio.timeout(limit):
                connection = await self._connection()
                blocks = await connection.send([head, *body])
        except OSError as error:
            if connection is not None:
                connection.close()
            reason = str(error) or f"no answer within {max(0.0, limit):.0f} s"
            return Answer(output_tokens, begin, lost=f"{type(error).__name__}: {reason}")
        self._free.append(connection)
        return Answer(output_tokens, begin, blocks)

    async def _connection(self) -> Connection:
        while self._free:
            connection = self._free.pop()
            if connection.reusable and time.perf_counter() - connection.free_since < IDLE_LIMIT_SECONDS:
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        ssl = True if self._secure else None
        _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=ssl)
        return connection

    def close(self) -> None:
        for connection in self._free:
            connection.close()


def _encoded(ids: tuple[int, ...]) -> bytes:
    """Token ids as the inside of a JSON list."""
    return orjson.dumps(ids)[1:-1]


def _with_commas(parts: list[bytes]) -> Iterator[bytes]:
    """The parts that hold ids, with commas between them."""
    filled = [part for part in parts if part]
    for place, part in enumerate(filled):
        if place:
            yield b","
        yield part


def _end_of_body(output_tokens: int) -> bytes:
    """What follows the ids in a greedy request for exactly `output_tokens` tokens."""
    sampling = {
        "max_new_tokens": output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    return b"]," + orjson.dumps({"sampling_params": sampling, "stream": True})[1:]
