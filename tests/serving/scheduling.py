"""What tests want of a scheduler that runs: another chunk size, and proof that steps overlap.

A plugin for SGLang that only tests install. One server then stands for servers of every chunk size: the
scheduler looks at its chunk size whenever it takes up a prompt.
"""

from __future__ import annotations

from typing import Any

import requests
from sglang.srt.managers.io_struct import SetInternalStateReqOutput
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_CHUNK = "chunked_prefill_size"
_OVERLAPPED = "overlapped_steps"


def set_chunk_tokens(url: str, tokens: int) -> None:
    """Prompts that arrive from now on are computed `tokens` at a time."""
    response = requests.post(f"{url}/set_internal_state", json={"server_args": {_CHUNK: tokens}}, timeout=60)
    assert response.status_code == 200 and response.json() == [True], response.text


def overlapped_steps(url: str) -> int:
    """Steps that the server launched before it had the results of the step in front."""
    (state,) = requests.get(f"{url}/server_info", timeout=60).json()["internal_states"]
    return state[_OVERLAPPED]


def _around_set(original: Any, scheduler: Any, request: Any) -> Any:
    if _CHUNK not in request.server_args:
        return original(scheduler, request)
    scheduler.chunked_prefill_size = request.server_args[_CHUNK]
    return SetInternalStateReqOutput(updated=True)


def _before_results(scheduler: Any, *_: Any) -> None:
    # The loop has taken these results off its queue: what is left belongs to a step that has been launched.
    queue = getattr(scheduler, "result_queue", ())
    setattr(scheduler, _OVERLAPPED, getattr(scheduler, _OVERLAPPED, 0) + (len(queue) > 0))


def _after_get(output: Any, scheduler: Any, *_: Any) -> Any:
    output.internal_state[_OVERLAPPED] = getattr(scheduler, _OVERLAPPED, 0)
    return output


def register() -> None:
    """The plugin's entry point."""
    HookRegistry.register(f"{_SCHEDULER}.set_internal_state", _around_set, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.get_internal_state", _after_get, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.process_batch_result", _before_results, HookType.BEFORE)
