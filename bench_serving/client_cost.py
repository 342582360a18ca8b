"""`python -m bench_serving.client_cost`: CPU time of the load generator per request and per streamed token.

A child process replays streams of one event per token at a fixed pace. A request's own cost is that of an
answer of one token; a token's is the rest of a long answer's, by its tokens. *floor* is a loop over epoll
that does nothing but read what has arrived and the clock: what waking up and reading cost by themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from bench_serving import client
from bench_serving.options import LaidOutHelp, above_zero, count, numbers
from bench_serving.sessions import Session, Turn
from bench_serving.stream import LAST_CHUNK

READ_BYTES = 16384
LEAST_REQUESTS = 32
"""With an answer of one token each."""


@dataclass(frozen=True)
class Cost:
    """Microseconds of CPU time, with `concurrency` requests in flight."""

    concurrency: int
    request: float
    token: float
    floor_token: float

    def core_share(self, tokens: int, requests_per_second: float = 100.0) -> float:
        """Part of a core that so many requests a second of so many tokens take."""
        return requests_per_second * (self.request + tokens * self.token) / 1e6


def measure(concurrency: int, *, prompt_tokens: int, tokens: int, milliseconds: float) -> Cost:
    """The cost with `concurrency` streams of `tokens` that get a token every so many milliseconds."""
    with replaying(milliseconds) as port:
        once = _drive(port, concurrency, max(LEAST_REQUESTS, 4 * concurrency), prompt_tokens, 1)
        long = _drive(port, concurrency, concurrency, prompt_tokens, tokens)
        floor = _read_only(port, concurrency, tokens)
    return Cost(concurrency, once, (long - once) / (tokens - 1), floor)


@contextlib.contextmanager
def replaying(milliseconds: float) -> Iterator[int]:
    """The port of a `bench_serving.replay` process."""
    command = [sys.executable, "-m", "bench_serving.replay", f"{milliseconds:g}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield int(process.stdout.readline())
        process.stdin.close()


def _drive(port: int, concurrency: int, requests: int, prompt_tokens: int, tokens: int) -> float:
    """Microseconds of the client per request; connections are made in the time, as in a point."""
    opening = tuple(range(10_000, 10_000 + prompt_tokens))
    sessions = [Session(key, opening, 0, (Turn(((key,),), tokens, 0.0),)) for key in range(requests)]
    driven = client.drive(f"http://127.0.0.1:{port}", sessions, concurrency)
    failed = [exchange.output.error for exchange in driven.exchanges if not exchange.output.success]
    assert not failed, failed[0]
    return 1e6 * driven.client_cpu_seconds / requests


def _read_only(port: int, concurrency: int, tokens: int) -> float:
    """Microseconds per token of a reader that does not look at what it reads."""
    body = b'{"input_ids":[1],"sampling_params":{"max_new_tokens":%d}}' % tokens
    request = b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with contextlib.ExitStack() as stack:
        poll = stack.enter_context(select.epoll())
        open_sockets = {}
        for _ in range(concurrency):
            connected = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            poll.register(connected, select.EPOLLIN)
            open_sockets[connected.fileno()] = connected
            connected.sendall(request)
        begin, arrived = time.thread_time(), []
        while open_sockets:
            for number, _ in poll.poll():
                data = open_sockets[number].recv(READ_BYTES)
                arrived.append((time.perf_counter(), data))
                if data.endswith(LAST_CHUNK[2:]):
                    del open_sockets[number]
        return 1e6 * (time.thread_time() - begin) / (concurrency * tokens)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench_serving.client_cost",
        description=__doc__,
        formatter_class=LaidOutHelp,
    )
    parser.add_argument(
        "--concurrency", type=numbers, default="1,8,32", metavar="N[,N]", help="requests in flight"
    )
    parser.add_argument("--prompt-tokens", type=count, default=60_000, metavar="N", help="of each request")
    parser.add_argument(
        "--tokens", type=count, default=160, metavar="N", help="of an answer, one event each; at least 2"
    )
    parser.add_argument(
        "--milliseconds", type=above_zero, default=15.0, help="between two tokens of a stream"
    )
    chosen = parser.parse_args(arguments)
    if chosen.tokens < 2:
        parser.error("--tokens must be at least 2: a token's cost is a difference")
    print(
        f"| in flight | per request, us | core at 100 requests/s | per token, us | floor, us "
        f"| core at 100 requests/s with {chosen.tokens} tokens each |\n|---|---|---|---|---|---|"
    )
    for concurrency in chosen.concurrency:
        cost = measure(
            concurrency,
            prompt_tokens=chosen.prompt_tokens,
            tokens=chosen.tokens,
            milliseconds=chosen.milliseconds,
        )
        print(
            f"| {concurrency} | {cost.request:.0f} | {cost.core_share(0):.1%} | {cost.token:.1f} "
            f"| {cost.floor_token:.1f} | {cost.core_share(chosen.tokens):.0%} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
