"""Servers that write what a test tells them to: a plugin for SGLang that only tests install.

A request whose header `HEADER` lists token ids gets them as its completion, and then the end of the turn. The
tokens are chosen where every token is, in the sampler, so all that comes after it is the server's own:
scheduler, detokenizer, parsers and events, whatever the endpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from launch.server import ROOT, serving
from sglang_m3.tiny.vocabulary import EOS

HEADER = "x-forced-tokens"
NAME = "forced_tokens"
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
    """Before `TokenizerManager.generate_request`: what the header asks for."""
    if request is None or HEADER not in request.headers:
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

    def header(self, *pieces: str) -> dict[str, str]:
        """The header for a reply; no token spans two pieces, so a marker can be cut into several tokens."""
        ids = [token for piece in pieces for token in self.tokenizer(piece)["input_ids"]]
        return {HEADER: json.dumps([*ids, self._end])}


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


@contextlib.contextmanager
def server(checkpoint: Path, scratch: Path, *flags: str) -> Iterator[str]:
    """`launch/serve.sh` with the plugin installed for this server only; yields the URL."""
    installed = scratch / "plugins" / "forced_tokens-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: forced-tokens\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{NAME} = {__name__}:register\n")
    path = os.pathsep.join((str(installed.parent), str(ROOT)))
    environ = {"TINY": str(checkpoint), "PYTHONPATH": path}
    with serving(scratch / "server.log", (*FLAGS, *flags), environ, quiet=True) as url:
        yield url
