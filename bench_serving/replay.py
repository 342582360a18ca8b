"""`python -m bench_serving.replay MILLISECONDS`: answers `/generate` with ready-made events at a fixed pace.

All requests get their next event at the same tick, as a decode step's tokens come. It prints its port and
serves until its standard input ends. `bench_serving.client_cost` measures against it what a client costs.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import sys
import time

import uvloop

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN, CACHED_TOKENS = 12345, 59904


@functools.cache
def chunks(tokens: int) -> tuple[bytes, ...]:
    """An answer of so many tokens as SGLang streams it: every event repeats the ids before it."""
    made = []
    for count in range(1, tokens + 1):
        meta = {
            "id": "0123456789abcdef0123456789abcdef",
            "finish_reason": {"type": "length", "length": tokens} if count == tokens else None,
            "prompt_tokens": 0,
            "cached_tokens": CACHED_TOKENS,
            "completion_tokens": count,
        }
        event = {"text": "", "output_ids": [TOKEN] * count, "meta_info": meta}
        data = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
        made.append(b"%x\r\n%b\r\n" % (len(data), data))
    return (*made, b"0\r\n\r\n")


class _Answering(asyncio.Protocol):
    """A connection; `waiting` are the chunks still to send."""

    active: list[_Answering]

    def __init__(self, active: list[_Answering]) -> None:
        self.active = active
        self.waiting: list[bytes] = []
        self._received, self._wanted = [b""], 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        if not self._wanted:
            head, separator, body = b"".join(self._received).partition(b"\r\n\r\n")
            if not separator:
                return
            self._wanted = int(re.search(rb"content-length: *(\d+)", head.lower())[1])
            self._received = [body]
        if sum(map(len, self._received)) >= self._wanted:
            tokens = int(re.search(rb'"max_new_tokens":(\d+)', b"".join(self._received[-2:])[-400:])[1])
            self._received, self._wanted = [b""], 0
            self.transport.write(HEAD)
            self.waiting = list(reversed(chunks(tokens)))
            self.active.append(self)

    def connection_lost(self, exception: Exception | None) -> None:
        self.waiting.clear()


async def _serve(interval: float) -> None:
    loop = asyncio.get_running_loop()
    active: list[_Answering] = []
    server = await loop.create_server(lambda: _Answering(active), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    closed = loop.run_in_executor(None, sys.stdin.read)
    tick = time.monotonic()
    while not closed.done():
        tick = max(tick + interval, time.monotonic())
        await asyncio.sleep(tick - time.monotonic())
        for connection in active:
            if connection.waiting:
                connection.transport.write(connection.waiting.pop())
            if len(connection.waiting) == 1:
                connection.transport.write(connection.waiting.pop())
        active[:] = [connection for connection in active if connection.waiting]


if __name__ == "__main__":
    uvloop.run(_serve(float(sys.argv[1]) / 1e3))
