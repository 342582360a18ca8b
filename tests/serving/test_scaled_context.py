"""Beyond the original context, served results equal transformers': YaRN from `--json-model-override-args`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests

from tests import oracle
from tests.serving.client import Server, server
from tests.serving.expectation import Oracle, check

pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.xdist_group("scaled context")]

ORIGINAL = 512
SCALED = {
    "max_position_embeddings": ORIGINAL,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
}


@pytest.fixture(scope="module")
def scaled(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    override = json.dumps({"text_config": SCALED})
    flags = ("--json-model-override-args", override, "--max-total-tokens", "8192")
    with server(tiny, tmp_path_factory.mktemp("scaled"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def scaled_oracle(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """transformers reads the same from config.json."""
    folder = Path(shutil.copytree(tiny, tmp_path_factory.mktemp("oracle") / "tiny"))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= SCALED
    path.write_text(json.dumps(config))
    return Oracle(oracle.load_oracle(folder))


@pytest.mark.parametrize("length", [500, 1000, 2001])
def test_logprobs_and_blocks_equal_the_oracle(
    scaled: Server, scaled_oracle: Oracle, prompt: Callable[..., list[int]], length: int
) -> None:
    ids = prompt(length)
    check(scaled, scaled_oracle, ids, scaled.complete(ids, new_tokens=3, logprob_start=0))


def test_the_context_ends_where_the_scaling_ends(scaled: Server, prompt: Callable[..., list[int]]) -> None:
    body = {"input_ids": prompt(4 * ORIGINAL + 1), "sampling_params": {"max_new_tokens": 1}}
    answer = requests.post(f"{scaled.url}/generate", json=body, timeout=60)
    assert answer.status_code == 400 and f"context length ({4 * ORIGINAL} tokens)" in answer.text
