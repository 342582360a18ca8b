"""A BF16 checkpoint served with the published command's MXFP8 flags answers as its dequantised conversion."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sglang_m3.quantize import quantize_checkpoint
from sglang_m3.tiny import TinyConfig, build
from tests import oracle
from tests.quantization.edited import dequantise, edited
from tests.serving.client import Server, server
from tests.serving.expectation import Oracle, check

pytestmark = [pytest.mark.server, pytest.mark.long]

FLAGS = ("--quantization", "mxfp8", "--moe-runner-backend", "deep_gemm", "--chunked-prefill-size", "256")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("served") / "tiny", TinyConfig())


@pytest.fixture(scope="module")
def running(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tiny, tmp_path_factory.mktemp("server"), *FLAGS) as started:
        yield started


@pytest.fixture(scope="module")
def expected(tiny: Path) -> Oracle:
    converted = quantize_checkpoint(tiny, tiny.parent / "converted")
    numbers = edited(converted, tiny.parent / "numbers", dequantise, declared=False)
    return Oracle(oracle.load_oracle(numbers))


@pytest.mark.parametrize("length", [1, 129, 900])
def test_logits_and_blocks_are_those_of_the_dequantised_checkpoint(
    running: Server, expected: Oracle, tiny: Path, length: int
) -> None:
    ids = AutoTokenizer.from_pretrained(tiny)(inspect.getsource(inspect))["input_ids"][400 : 400 + length]
    answer = running.complete(ids, new_tokens=20, logprob_start=0)
    check(running, expected, ids, answer)
