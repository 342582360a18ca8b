"""The OpenAI client of a server whose model writes what it likes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import requests


@dataclass(frozen=True)
class Served:
    """A running server, its log, and the arguments that every request of these tests has."""

    url: str
    log: Path
    client: openai.OpenAI
    model: str

    def complete(self, prompt: Any, max_tokens: int = 12, **options: Any) -> Any:
        """Greedy unless `options` say otherwise, and never ended early."""
        options = {"temperature": 0, "extra_body": {"ignore_eos": True}, **options}
        return self.client.completions.create(
            model=self.model, prompt=prompt, max_tokens=max_tokens, **options
        )

    def chat(
        self, content: Any, max_tokens: int = 12, thinking_mode: str = "disabled", **options: Any
    ) -> Any:
        """One user message, greedy unless `options` say otherwise, and never ended early."""
        body = {"ignore_eos": True, "chat_template_kwargs": {"thinking_mode": thinking_mode}}
        return self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": content}],
            max_tokens=max_tokens,
            extra_body=body,
            **{"temperature": 0, **options},
        )

    def flush(self) -> None:
        """Empty the radix cache."""
        response = requests.post(f"{self.url}/flush_cache", timeout=60)
        assert response.status_code == 200, response.text


def connect(url: str, log: Path) -> Served:
    """The client of the server at `url`, which writes to `log`; it does not retry."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    return Served(url, log, client, client.models.list().data[0].id)
