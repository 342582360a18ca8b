"""A server that answers like SGLang's `/generate`, without a model: its tokens depend on the prompt alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import orjson
from aiohttp import web

from bench_serving.sessions import PAGE_TOKENS, _page_chain


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """What the fake generates."""
    first = sum(prompt) % 1000
    return [(first + step) % 1000 for step in range(count)]


@dataclass
class FakeServer:
    """Serves in a thread between `__enter__` and `__exit__`.

    Attributes:
        incremental: each event holds its own tokens alone, as with --incremental-streaming-output.
        pair: two tokens per event.
        fault: called with the number of the request; "http", "stream", "short" or "drop" makes it fail.
        token_seconds: pause before each event.
        prompts: what was asked, in order of arrival.
        most_at_once: largest number of requests that were open together.
        connections: client addresses that requests came from.
    """

    incremental: bool = False
    pair: bool = False
    fault: Callable[[int], str | None] = lambda number: None
    token_seconds: float = 0.0
    model_path: str = "model"
    prompts: list[list[int]] = field(default_factory=list)
    most_at_once: int = 0
    connections: set[tuple[str, int]] = field(default_factory=set)
    flushed: int = 0
    _open: int = 0
    _pages: set[int] = field(default_factory=set)
    _scored: int = 0

    def __enter__(self) -> FakeServer:
        ready = threading.Event()
        self._loop = asyncio.new_event_loop()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(self._start())
            ready.set()
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/flush_cache", self._flush),
                web.get("/server_info", self._info),
                web.get("/metrics", self._metrics),
            ]
        )
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _flush(self, request: web.Request) -> web.Response:
        self.flushed += 1
        self._pages.clear()
        return web.Response()

    async def _info(self, request: web.Request) -> web.Response:
        states = [{"memory_usage": {"weight": 1.5, "kvcache": 2.5}}]
        return web.json_response(
            {"model_path": self.model_path, "max_total_num_tokens": 4096, "internal_states": states}
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        names = {"index_pages_scored": self._scored, "index_pages_saved": 3 * self._scored, "rows": 7}
        return web.Response(
            text="".join(f'sglang:m3_{name}_total{{rank="0"}} {value}.0\n' for name, value in names.items())
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        prompt, count = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        number = len(self.prompts)
        self.prompts.append(prompt)
        self.connections.add(request.transport.get_extra_info("peername"))
        fault = self.fault(number)
        if fault == "http":
            return web.json_response({"error": "no such thing"}, status=400)
        self._open += 1
        self.most_at_once = max(self.most_at_once, self._open)
        try:
            return await self._stream(request, prompt, count, fault)
        finally:
            self._open -= 1

    async def _stream(
        self, request: web.Request, prompt: list[int], count: int, fault: str | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chain = _page_chain(tuple(prompt))
        cached = PAGE_TOKENS * sum(page in self._pages for page in chain)
        self._pages.update(chain)
        tokens = expected_tokens(prompt, count)
        size = 2 if self.pair else 1
        for begin in range(0, count, size):
            if self.token_seconds:
                await asyncio.sleep(self.token_seconds)
            end = min(begin + size, count)
            if fault == "drop" and begin:
                request.transport.close()
                return response
            if fault == "stream" and begin:
                await response.write(b'data: {"error":{"message":"went wrong"}}\n\n')
                break
            last = end == count or (fault == "short" and begin > 0)
            meta = {
                "id": "x",
                "finish_reason": {"type": "length", "length": count} if last else None,
                "prompt_tokens": len(prompt),
                "cached_tokens": cached,
                "completion_tokens": end,
            }
            ids = tokens[begin:end] if self.incremental else tokens[:end]
            event = {"text": 'completion_tokens": 99', "output_ids": ids, "meta_info": meta}
            # In two writes: what arrives together is up to the network, not to the server.
            data = b"data: " + orjson.dumps(event) + b"\n\n"
            await response.write(data[:17])
            await response.write(data[17:])
            self._scored += 1
            if last:
                break
        await response.write(b"data: [DONE]\n\n")
        return response
