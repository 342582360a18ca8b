"""The emulated rank has a real rank's sizes, a tokenizer for text, and says what it is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bench_serving import one_rank
from bench_serving.one_rank import Rank, config
from bench_serving.store import NOTE

EIGHTH = {
    "hidden_size": 6144,
    "num_hidden_layers": 60,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "intermediate_size": 3072,
    "dense_intermediate_size": 1536,
    "shared_intermediate_size": 384,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "vocab_size": 25008,
    "rotary_dim": 64,
    "max_position_embeddings": 1 << 20,
    "moe_layer_freq": [0] * 3 + [1] * 57,
}


def test_a_rank_of_eight_has_an_eighth_of_what_parallelism_divides() -> None:
    text = config(Rank(of=8))["text_config"]
    assert {name: text[name] for name in EIGHTH} == EIGHTH
    sparse = text["sparse_attention_config"]
    assert (sparse["sparse_num_index_heads"], sparse["sparse_topk_blocks"], sparse["sparse_index_dim"]) == (
        1,
        16,
        128,
    )


def test_one_rank_of_one_is_the_released_model() -> None:
    text = config(Rank(of=1))["text_config"]
    wanted = {
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "vocab_size": 200064,
    }
    assert {name: text[name] for name in wanted} == wanted
    assert text["num_experts_per_tok"] == 4 and text["dense_intermediate_size"] == 12288


def test_the_folder_holds_a_tokenizer_of_text_and_its_bias(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert one_rank.main(["--of", "8", str(tmp_path / "rank")]) == 0
    note = (tmp_path / "rank" / NOTE).read_text()
    assert "one rank of 8" in note and "mean is 0.5" in note and "no collectives" in note
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "rank")
    ids = tokenizer("def main() -> None:\n    print('größer')", add_special_tokens=False)["input_ids"]
    made = json.loads((tmp_path / "rank" / "config.json").read_text())
    assert max(ids) < made["text_config"]["vocab_size"]
    assert tokenizer.eos_token_id == made["eos_token_id"] == made["text_config"]["eos_token_id"]


@pytest.mark.parametrize(
    "arguments", [["--of", "0"], ["--of", "3"], ["--of", "8", "--experts", "12"], ["--layers", "3"]]
)
def test_what_cannot_be_divided_is_refused(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        one_rank.main([*arguments, str(tmp_path / "rank")])
    assert not (tmp_path / "rank").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        one_rank.main([str(tmp_path / "file" / "rank")])
    assert f"error: [Errno 20] Not a directory: '{tmp_path}/file/rank'" in capsys.readouterr().err


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(SystemExit):
        one_rank.main([str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
