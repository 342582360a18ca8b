"""Servers that write what a test tells them to: a plugin for SGLang that only tests install.

A request whose header `HEADER` lists token ids gets them as its completion, and then the end of the turn. The
tokens are chosen where every token is, in the sampler, so all that comes after it is the server's own:
scheduler, detokenizer, parsers and events, whatever the endpoint.

A request whose header `PROMPT_HEADER` names a file leaves its rendered prompt there. One with a `STEP_HEADER`
streams that many tokens at a time, as with drafts or a busy server. `BIAS_HEADER` has a JSON object of biases
by token id, for the APIs that have none.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from sglang.lang.backend import runtime_endpoint
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from launch.server import serving
from sglang_m3.tiny.vocabulary import EOS
from tests.serving import plugins

HEADER = "x-forced-tokens"
PROMPT_HEADER = "x-prompt-file"
STEP_HEADER = "x-tokens-at-a-time"
BIAS_HEADER = "x-logit-bias"
FLAGS = ("--enable-custom-logit-processor",)


class ForcedTokens(CustomLogitProcessor):
    """Leaves one token possible: the next of the request's `token_ids`, and their last from then on.

    The position is the count of decode steps that the scheduler has started, which is ahead of the tokens
    that it has received while steps overlap; a retracted request would begin again.
    """

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        """`[rows, vocab]` logits and the parameters of each row's request; both as SGLang has them."""
        assert custom_param_list is not None
        for row, parameters in zip(logits, custom_param_list):
            token_ids = parameters["token_ids"]
            token = token_ids[min(parameters["__req__"].decode_batch_idx, len(token_ids) - 1)]
            row.fill_(-torch.inf)
            row[token] = 0
        return logits


def _force(manager: Any, generation: Any, request: Any = None) -> None:
    """Before `TokenizerManager.generate_request`: what the headers ask for."""
    if request is None:
        return
    if PROMPT_HEADER in request.headers:
        prompt = {"text": generation.text, "input_ids": generation.input_ids}
        Path(request.headers[PROMPT_HEADER]).write_text(json.dumps(prompt))
    if STEP_HEADER in request.headers:
        step = int(request.headers[STEP_HEADER])
        generation.sampling_params = {**generation.sampling_params, "stream_interval": step}
    if BIAS_HEADER in request.headers:
        bias = json.loads(request.headers[BIAS_HEADER])
        generation.sampling_params = {**generation.sampling_params, "logit_bias": bias}
    if HEADER not in request.headers:
        return
    generation.custom_logit_processor = ForcedTokens.to_str()
    token_ids = json.loads(request.headers[HEADER])
    generation.sampling_params = {**generation.sampling_params, "custom_params": {"token_ids": token_ids}}


def register() -> None:
    """The plugin's entry point."""
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request", _force, HookType.BEFORE
    )


class Writer:
    """Writes replies in the tokens of a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint)
        self._end = self.tokenizer.convert_tokens_to_ids(EOS)

    def token_ids(self, *pieces: str) -> list[int]:
        """A reply and its end; no token spans two pieces, so a marker can be cut into several tokens."""
        return [*(token for piece in pieces for token in self.tokenizer(piece)["input_ids"]), self._end]

    def header(self, *pieces: str) -> dict[str, str]:
        """The header for a reply."""
        return {HEADER: json.dumps(self.token_ids(*pieces))}


def client(writer: Writer, replies: Sequence[str]) -> httpx.Client:
    """A client whose POST requests get these replies in turn, for programs that make their own requests.

    Requests after the last reply are not forced.
    """
    left = iter(replies)

    def force(request: httpx.Request) -> None:
        reply = next(left, None) if request.method == "POST" else None
        if reply is not None:
            request.headers.update(writer.header(reply))

    return httpx.Client(event_hooks={"request": [force]}, timeout=60)


def frontend_request(writer: Writer, replies: Sequence[str]) -> Callable[..., Any]:
    """What does the same for programs of SGLang's frontend, in place of `runtime_endpoint.http_request`."""
    left = iter(replies)
    original = runtime_endpoint.http_request

    def request(url: str, json: Any = None, **options: Any) -> Any:
        reply = next(left, None) if url.endswith("/generate") else None
        if reply is not None:
            sampling = {**json["sampling_params"], "custom_params": {"token_ids": writer.token_ids(reply)}}
            forced = {"custom_logit_processor": ForcedTokens.to_str(), "sampling_params": sampling}
            json = {**json, **forced}
        return original(url, json=json, **options)

    return request


@contextlib.contextmanager
def server(checkpoint: Path, scratch: Path, *flags: str) -> Iterator[str]:
    """`launch/serve.sh` with the plugin installed for this server only; yields the URL."""
    environ = {"TINY": str(checkpoint), **plugins.installed(scratch, __name__)}
    with serving(scratch / "server.log", (*FLAGS, *flags), environ, quiet=True) as url:
        yield url
