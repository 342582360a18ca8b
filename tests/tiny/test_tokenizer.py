"""The tokenizer loses no text and knows M3's markers as single tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from sglang_m3.tiny import TinyConfig
from sglang_m3.tiny.tokenizer import train
from sglang_m3.tiny.vocabulary import MARKERS, VISIBLE, token_id

VOCAB = 600
SMALL = train(VOCAB)


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    assert SMALL.decode(SMALL.encode(text).ids, skip_special_tokens=False) == text


@given(st.lists(st.sampled_from(MARKERS) | st.text(max_size=5)).map("".join))
def test_text_with_markers_round_trips(text: str) -> None:
    assert SMALL.decode(SMALL.encode(text).ids, skip_special_tokens=False) == text


def test_training_is_deterministic() -> None:
    assert train(VOCAB).to_str() == SMALL.to_str()


def test_loaded_tokenizer_fills_the_embedding_exactly(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == TinyConfig().vocab
    assert sorted(tokenizer.get_vocab().values()) == list(range(TinyConfig().vocab))


@pytest.mark.parametrize("marker", MARKERS)
def test_marker_is_one_token_even_inside_text(tokenizer: PreTrainedTokenizerBase, marker: str) -> None:
    identity = token_id(marker, TinyConfig().vocab)
    assert tokenizer.convert_tokens_to_ids(marker) == identity
    assert tokenizer.encode(f"a {marker}b", add_special_tokens=True).count(identity) == 1
    kept = marker in tokenizer.decode([identity], skip_special_tokens=True)
    assert kept == (marker in VISIBLE), "the parsers need exactly the visible markers in decoded text"


def test_config_names_the_tokens_that_the_tokenizer_has(
    checkpoint: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    generation = json.loads((checkpoint / "generation_config.json").read_text())
    for holder in (config, config["text_config"], generation):
        assert holder["bos_token_id"] == tokenizer.bos_token_id
        assert holder["eos_token_id"] == tokenizer.eos_token_id
        assert holder["pad_token_id"] == tokenizer.pad_token_id
    assert config["image_token_index"] == tokenizer.convert_tokens_to_ids("]<]image[>[")
    assert config["video_token_index"] == tokenizer.convert_tokens_to_ids("]<]video[>[")
    names = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    assert len(set(names)) == 3


def test_real_text_needs_clearly_fewer_tokens_than_bytes(tokenizer: PreTrainedTokenizerBase) -> None:
    text = Path(json.__file__).read_text(encoding="utf-8")
    assert len(tokenizer.encode(text)) < len(text.encode()) / 2.5
