"""Talk to a served checkpoint in token ids, and read back what it chose."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from torch import Tensor

from launch.server import serving
from sglang_m3 import hardware
from sglang_m3.attention import recorder
from sglang_m3.experts.recorder import ENDING
from tests.serving import plugins, scheduling


@dataclass(frozen=True)
class Completion:
    """What a server answered.

    Attributes:
        request_id: the id that its steps are recorded under.
        token_ids: the generated tokens.
        prompt_logprobs: position -> log-probability of the prompt token at that position.
        token_logprobs: log-probabilities of the generated tokens.
        cached_tokens: prompt tokens that came from the radix cache.
        retractions: how often the scheduler took the request's pages away.
    """

    request_id: str
    token_ids: list[int]
    prompt_logprobs: dict[int, float]
    token_logprobs: list[float]
    cached_tokens: int
    retractions: int


class Server:
    """A running server and the directory where it records its selections."""

    def __init__(self, url: str, record_dir: Path) -> None:
        self.url = url
        self.record_dir = record_dir

    def complete(
        self, prompt: Sequence[int], new_tokens: int = 1, *, logprob_start: int = -1, **sampling: Any
    ) -> Completion:
        """Greedy completion; prompt log-probabilities from position `logprob_start` on (-1: none)."""
        request_id = uuid.uuid4().hex
        response = requests.post(
            f"{self.url}/generate",
            json={
                "rid": request_id,
                "input_ids": list(prompt),
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": new_tokens,
                    "ignore_eos": True,
                    **sampling,
                },
                "return_logprob": True,
                "logprob_start_len": logprob_start,
            },
            timeout=600,
        )
        assert response.status_code == 200, response.text
        answer = response.json()
        meta = answer["meta_info"]
        first = max(logprob_start, 0)
        prompt_logprobs = {
            first + offset: value
            for offset, (value, _, _) in enumerate(meta.get("input_token_logprobs", ()))
            if value is not None
        }
        return Completion(
            request_id,
            answer["output_ids"],
            prompt_logprobs if logprob_start >= 0 else {},
            [value for value, _, _ in meta["output_token_logprobs"]],
            meta["cached_tokens"],
            meta["num_retractions"],
        )

    def complete_together(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, **sampling: Any
    ) -> list[Completion]:
        """All at once, answers in the order of `prompts`."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, new_tokens, **sampling), prompts))

    def flush(self) -> None:
        """Empty the radix cache."""
        response = requests.post(f"{self.url}/flush_cache", timeout=60)
        assert response.status_code == 200, response.text

    def set_chunk_tokens(self, tokens: int) -> None:
        """Prompts that arrive from now on are computed `tokens` at a time."""
        scheduling.set_chunk_tokens(self.url, tokens)

    def blocks(self, request_id: str) -> dict[int, dict[int, Tensor]]:
        """Sparse layer -> position -> `[H, topk]`, the blocks that the request's tokens chose."""
        found: dict[int, dict[int, Tensor]] = {}
        for step in recorder.load(self.record_dir):
            if request_id not in step.request_ids:
                continue
            mine = torch.where(step.request == step.request_ids.index(request_id))[0]
            for layer, chosen in step.chosen.items():
                for row in mine.tolist():
                    found.setdefault(layer, {})[int(step.position[row])] = chosen[:, row]
        return found

    def rows_per_step(self, request_id: str) -> list[int]:
        """How many of the request's tokens each recorded step computed."""
        steps = [step for step in recorder.load(self.record_dir) if request_id in step.request_ids]
        return [int((step.request == step.request_ids.index(request_id)).sum()) for step in steps]

    def largest_batch(self) -> int:
        """The most requests that a recorded step held."""
        return max(len(step.request_ids) for step in recorder.load(self.record_dir))

    def forget_blocks(self) -> None:
        """Delete what was recorded so far, blocks and experts."""
        for path in self.record_dir.iterdir():
            if path.suffix in (".pt", ENDING):
                path.unlink()


@contextlib.contextmanager
def server(checkpoint: Path, scratch: Path, *flags: str) -> Iterator[Server]:
    """Serve a checkpoint in float32 with `flags`, recording its selections."""
    if hardware.target() != "cpu":
        pytest.skip("the comparison in float32 is for machines without a GPU")
    record_dir = scratch / "blocks"
    record_dir.mkdir()
    environ = {
        "TINY": str(checkpoint),
        "SGLANG_M3_RECORD_BLOCKS": str(record_dir),
        **plugins.installed(scratch, scheduling.__name__),
    }
    with serving(scratch / "server.log", ("--dtype", "float32", *flags), environ, quiet=True) as url:
        yield Server(url, record_dir)
