"""Compare what a server answered with transformers' own model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests import oracle
from tests.serving.client import Completion, Server

LOGPROB_TOLERANCE = 1e-5


class Oracle:
    """Oracle runs, remembered by token ids."""

    def __init__(self, model: oracle.Model) -> None:
        self._model = model
        self._runs: dict[tuple[int, ...], oracle.OracleRun] = {}

    def run(self, token_ids: Sequence[int]) -> oracle.OracleRun:
        key = tuple(token_ids)
        if key not in self._runs:
            self._runs[key] = oracle.run(self._model, key)
        return self._runs[key]


def check(server: Server, expected: Oracle, prompt: Sequence[int], answer: Completion) -> None:
    """Log-probabilities within 1e-5, the same chosen blocks, and greedy tokens that the oracle agrees with.

    Every computed position is compared: prompt tokens that came from the cache were not computed.
    """
    # The last generated token was never fed back.
    fed = [*prompt, *answer.token_ids[:-1]]
    run = expected.run(fed)
    _check_logprobs(run.logprobs, prompt, answer)
    chosen = server.blocks(answer.request_id)
    computed = set(range(answer.cached_tokens, len(fed)))
    assert set(chosen) == set(run.blocks), f"layers recorded {sorted(chosen)}, expected {sorted(run.blocks)}"
    for layer, by_position in chosen.items():
        missing = computed - set(by_position)
        assert not missing, f"layer {layer}: nothing recorded for positions {sorted(missing)[:5]}"
        for position, blocks in by_position.items():
            want = run.blocks[layer][:, position]
            assert torch.equal(blocks, want), (
                f"layer {layer} position {position} of {len(fed)}: chose {blocks.tolist()}, "
                f"expected {want.tolist()}"
            )


def _check_logprobs(logprobs: Tensor, prompt: Sequence[int], answer: Completion) -> None:
    for position, value in answer.prompt_logprobs.items():
        if position == 0:
            continue
        want = float(logprobs[position - 1, prompt[position]])
        assert abs(value - want) < LOGPROB_TOLERANCE, f"prompt position {position}: {value}, expected {want}"
    for offset, (token, value) in enumerate(zip(answer.token_ids, answer.token_logprobs)):
        row = logprobs[len(prompt) + offset - 1]
        assert abs(value - float(row[token])) < LOGPROB_TOLERANCE, (
            f"generated token {offset}: {value}, expected {float(row[token])}"
        )
        assert float(row.max() - row[token]) < LOGPROB_TOLERANCE, (
            f"generated token {offset} is {token}, the oracle prefers {int(row.argmax())}"
        )
