from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sglang_m3.tiny import TinyConfig, build
from tests import oracle
from tests.serving.expectation import Oracle


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("served") / "tiny", TinyConfig())


@pytest.fixture(scope="session")
def expected(tiny: Path) -> Oracle:
    return Oracle(oracle.load_oracle(tiny))


@pytest.fixture(scope="session")
def prompt(tiny: Path) -> Callable[[int, int], list[int]]:
    """`prompt(length, seed)`: token ids of real source code, from another place for every seed.

    The default place has no two blocks, in any layer and row of the longest prompt, whose scores differ by
    less than 4e-5 at the edge of the selection: a rounding error in front of it decides nothing.
    """
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    ids = tokenizer(inspect.getsource(inspect) + inspect.getsource(random))["input_ids"]

    def cut(length: int, seed: int = 10) -> list[int]:
        begin = random.Random(seed).randrange(len(ids) - length)
        return ids[begin : begin + length]

    return cut
