"""Two ranks, with gloo in place of NCCL, answer as one does: tensor, expert and pipeline parallel."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file

from sglang_m3.tiny import TinyConfig, build
from tests.serving.client import Completion, Server, server
from tests.serving.expectation import Oracle, check

pytestmark = [pytest.mark.server, pytest.mark.long]

MODES = {
    "tensor parallel": ("--tp-size", "2"),
    "tensor and expert parallel": ("--tp-size", "2", "--ep-size", "2"),
    "pipeline parallel": ("--pp-size", "2"),
}


class Ranks(Server):
    """A server of two ranks, each of which records the blocks of its own heads or layers."""

    def __init__(self, running: Server, *, heads_are_split: bool) -> None:
        super().__init__(running.url, running.record_dir)
        self._heads_are_split = heads_are_split

    def blocks(self, request_id: str) -> dict[int, dict[int, torch.Tensor]]:
        """As of one rank: heads of the ranks one after the other, or layers of all stages."""
        paths = sorted(self.record_dir.glob("*.pt"), key=lambda path: int(path.name.split("-")[0]))
        by_rank: dict[str, Path] = {}
        for path in paths:
            process = path.name.split("-")[0]
            by_rank[process] = self.record_dir / process
            by_rank[process].mkdir(exist_ok=True)
            shutil.copy(path, by_rank[process])
        # Ranks are started in order, so their process ids ascend.
        first, second = (Server(self.url, folder).blocks(request_id) for folder in by_rank.values())
        if not self._heads_are_split:
            assert not first.keys() & second.keys()
            return first | second
        assert {layer: chosen.keys() for layer, chosen in first.items()} == {
            layer: chosen.keys() for layer, chosen in second.items()
        }
        return {
            layer: {at: torch.cat([rows, second[layer][at]]) for at, rows in chosen.items()}
            for layer, chosen in first.items()
        }

    def forget_blocks(self) -> None:
        super().forget_blocks()
        for folder in filter(Path.is_dir, self.record_dir.iterdir()):
            shutil.rmtree(folder)


@pytest.fixture(scope="module", params=MODES)
def ranks(
    request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    flags = MODES[request.param]
    scratch = tmp_path_factory.mktemp("ranks")
    with server(tiny, scratch, "--chunked-prefill-size", "384", *flags) as running:
        yield Ranks(running, heads_are_split="--tp-size" in flags)


@pytest.fixture(autouse=True)
def fresh(ranks: Ranks) -> None:
    ranks.flush()
    ranks.forget_blocks()


@pytest.mark.parametrize("length", (1, 129, 2000))
def test_logprobs_and_blocks_equal_the_oracle(
    ranks: Ranks, expected: Oracle, prompt: Callable[..., list[int]], length: int
) -> None:
    ids = prompt(length)
    check(ranks, expected, ids, ranks.complete(ids, new_tokens=8, logprob_start=0))


def test_requests_that_share_a_prefix_are_each_as_if_alone(
    ranks: Ranks, expected: Oracle, prompt: Callable[..., list[int]]
) -> None:
    prefix = prompt(650)
    prompts = [prefix + prompt(40 + 37 * number, number + 1) for number in range(3)]
    ranks.complete(prefix)
    answers: list[Completion] = ranks.complete_together(prompts, new_tokens=6)
    assert min(answer.cached_tokens for answer in answers) >= 5 * 128
    for ids, answer in zip(prompts, answers):
        check(ranks, expected, ids, answer)


def test_an_update_from_disk_reaches_all_ranks(
    ranks: Ranks, expected: Oracle, tiny: Path, prompt: Callable[..., list[int]]
) -> None:
    ids = prompt(300)
    before = ranks.complete(ids)
    body = {"model_path": str(tiny)}
    assert requests.post(f"{ranks.url}/update_weights_from_disk", json=body, timeout=60).json()["success"]
    after = ranks.complete(ids)
    assert after == replace(before, request_id=after.request_id)
    check(ranks, expected, ids, after)


def test_a_checkpoint_that_does_not_fit_is_refused_by_all_ranks(
    ranks: Ranks, expected: Oracle, tmp_path: Path, prompt: Callable[..., list[int]]
) -> None:
    """Each loads its share before the name that does not fit, and goes back to the weights that it had."""
    broken = build(tmp_path / "broken", TinyConfig(seed=1))
    last = sorted(broken.glob("*.safetensors"))[-1]
    save_file(load_file(last) | {"strange.weight": torch.ones(1)}, last, {"format": "pt"})
    body = {"model_path": str(broken)}
    answer = requests.post(f"{ranks.url}/update_weights_from_disk", json=body, timeout=60)
    assert answer.status_code == 400 and "1 unknown: strange.weight" in answer.text, answer.text
    ids = prompt(300)
    ranks.flush()
    check(ranks, expected, ids, ranks.complete(ids, logprob_start=0))
