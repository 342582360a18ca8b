"""Weights are updated while the server runs, as training loops do; what does not fit changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from torch import Tensor

from sglang_m3.tiny import TinyConfig, build
from tests import oracle
from tests.serving.client import Server
from tests.serving.expectation import Oracle, check

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("float32")]

LENGTH = 450
"""Tokens of a prompt: within the blocks that every row attends to, so that no near-tie decides anything."""

Named = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Other:
    """Another checkpoint of the same shape, and what transformers says about it."""

    path: Path
    tensors: Named
    expected: Oracle


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Other:
    path = build(tmp_path_factory.mktemp("updates") / "other", TinyConfig(seed=1))
    tensors = [pair for file in sorted(path.glob("*.safetensors")) for pair in load_file(file).items()]
    return Other(path, tensors, Oracle(oracle.load_oracle(path)))


def post(running: Server, call: str, **body: Any) -> requests.Response:
    return requests.post(f"{running.url}/{call}", json=body, timeout=120)


def update_from_disk(running: Server, path: Path) -> requests.Response:
    return post(running, "update_weights_from_disk", model_path=str(path))


def send(running: Server, tensors: Any, load_format: str | None = None) -> requests.Response:
    """One call with tensors, or with a bucket."""
    # Shared memory with a name: the server is no child of multiprocessing's in this process.
    torch.multiprocessing.set_sharing_strategy("file_system")
    payload = MultiprocessingSerializer.serialize(tensors, output_str=True)
    body = {"serialized_named_tensors": [payload], "load_format": load_format}
    return post(running, "update_weights_from_tensor", **body)


@pytest.fixture(autouse=True)
def original(float32: Server, tiny: Path) -> Iterator[None]:
    """Every test begins and ends with the weights that the server was started with, and nothing cached."""
    float32.flush()
    float32.forget_blocks()
    yield
    assert update_from_disk(float32, tiny).json()["success"]


def check_serves(running: Server, expected: Oracle, ids: list[int]) -> None:
    answer = running.complete(ids, new_tokens=4, logprob_start=0)
    assert answer.cached_tokens == 0, "the cache of the weights before was not flushed"
    check(running, expected, ids, answer)


def test_an_update_from_disk_serves_what_a_fresh_server_would(
    float32: Server, expected: Oracle, other: Other, tiny: Path, prompt: Callable[..., list[int]]
) -> None:
    ids = prompt(LENGTH)
    check_serves(float32, expected, ids)
    for path, oracle_of in ((other.path, other.expected), (tiny, expected)):
        assert update_from_disk(float32, path).json()["success"]
        check_serves(float32, oracle_of, ids)


@pytest.mark.parametrize("load_format", (None, "flattened_bucket"))
def test_tensors_that_come_in_any_order_and_grouping_serve_what_a_fresh_server_would(
    float32: Server, other: Other, prompt: Callable[..., list[int]], load_format: str | None
) -> None:
    ids = prompt(LENGTH)
    float32.complete(ids)
    # Parts of merged parameters are torn apart: q, k and v of a layer, gate and up, tower included.
    shuffled = random.Random(0).sample(other.tensors, len(other.tensors))
    assert post(float32, "begin_weight_update").json()["success"]
    for begin in range(0, len(shuffled), 67):
        bucket: Any = shuffled[begin : begin + 67]
        if load_format is not None:
            flat = FlattenedTensorBucket(named_tensors=bucket)
            bucket = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        answer = send(float32, bucket, load_format).json()
        assert answer["success"], answer
    assert post(float32, "end_weight_update").json()["success"]
    check_serves(float32, other.expected, ids)


def test_a_cache_that_is_not_to_be_flushed_stays(
    float32: Server, tiny: Path, prompt: Callable[..., list[int]]
) -> None:
    """As SGLang has it, for updates that change nothing, such as this one."""
    ids = prompt(LENGTH)
    float32.complete(ids)
    answer = post(float32, "update_weights_from_disk", model_path=str(tiny), flush_cache=False).json()
    assert answer["success"], answer
    assert float32.complete(ids).cached_tokens == LENGTH // 128 * 128


def test_one_tensor_can_be_updated_alone(
    float32: Server, other: Other, tiny: Path, tmp_path: Path, prompt: Callable[..., list[int]]
) -> None:
    name = "language_model.model.layers.2.self_attn.k_proj.weight"
    mixed = build(tmp_path / "mixed", TinyConfig())
    for path in mixed.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            save_file(tensors | {name: dict(other.tensors)[name]}, path, {"format": "pt"})
    assert post(float32, "begin_weight_update").json()["success"]
    assert send(float32, [(name, dict(other.tensors)[name])]).json()["success"]
    assert post(float32, "end_weight_update").json()["success"]
    check_serves(float32, Oracle(oracle.load_oracle(mixed)), prompt(LENGTH))


@pytest.mark.parametrize(
    ("strange", "message"),
    [
        (("language_model.model.layers.1.self_attn.v.weight", torch.ones(3, 3)), "1 unknown: language_model"),
        (("language_model.model.norm.weight", torch.ones(3)), "1 misshapen: language_model.model.norm"),
    ],
    ids=("unknown", "misshapen"),
)
def test_tensors_that_do_not_fit_are_refused_and_change_nothing(
    float32: Server,
    expected: Oracle,
    other: Other,
    prompt: Callable[..., list[int]],
    strange: tuple[str, Tensor],
    message: str,
) -> None:
    assert post(float32, "begin_weight_update").json()["success"]
    answer = send(float32, [*other.tensors[:30], strange])
    assert post(float32, "end_weight_update").json()["success"]
    assert answer.status_code == 400
    assert message in answer.json()["message"], answer.text
    check_serves(float32, expected, prompt(LENGTH))


def test_a_checkpoint_that_does_not_fit_is_refused_and_the_one_before_served_on(
    float32: Server, expected: Oracle, other: Other, tmp_path: Path, prompt: Callable[..., list[int]]
) -> None:
    broken = build(tmp_path / "broken", TinyConfig(seed=1))
    last = sorted(broken.glob("*.safetensors"))[-1]
    tensors = load_file(last)
    name = next(iter(tensors))
    save_file({"strange." + name: tensors.pop(name), **tensors}, last, {"format": "pt"})
    answer = update_from_disk(float32, broken)
    assert answer.status_code == 400
    assert f"1 unknown: strange.{name}" in answer.json()["message"], answer.text
    float32.flush()
    last.write_bytes(last.read_bytes()[:-1])
    answer = update_from_disk(float32, broken)
    assert answer.status_code == 400
    assert f"{last.name} has" in answer.json()["message"] and "incomplete" in answer.text, answer.text
    check_serves(float32, expected, prompt(LENGTH))
