"""Tokenizer of a tiny checkpoint: byte-level BPE over Python source, then M3's markers."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from sglang_m3.tiny.vocabulary import BOS, EOS, MARKERS, PAD, SPECIAL

TRAINING_MODULES = (
    "argparse",
    "ast",
    "calendar",
    "configparser",
    "csv",
    "dataclasses",
    "datetime",
    "difflib",
    "doctest",
    "enum",
    "functools",
    "heapq",
    "inspect",
    "ipaddress",
    "locale",
    "statistics",
    "string",
    "textwrap",
    "zipfile",
)
"""Modules of the standard library whose source is the training text."""


def _source(stdlib: Path, name: str) -> str:
    """Source of a standard library module, which may be a package in another Python release."""
    module = stdlib / f"{name}.py"
    path = module if module.exists() else stdlib / name / "__init__.py"
    return path.read_text(encoding="utf-8")


def train(vocab: int) -> Tokenizer:
    """A tokenizer with exactly `vocab` tokens, the markers last (`vocabulary.token_id`).

    Any UTF-8 text round-trips. Deterministic for one Python release: the training text is its standard
    library, so another release gives other merges (other ids of ordinary text), but the same size and marker
    ids.
    """
    stdlib = Path(sysconfig.get_path("stdlib"))
    texts = [_source(stdlib, name) for name in TRAINING_MODULES]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(MARKERS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    for marker in MARKERS:
        token = AddedToken(marker, normalized=False, special=marker in SPECIAL)
        add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
        add([token])
    assert tokenizer.get_vocab_size() == vocab, (tokenizer.get_vocab_size(), vocab)
    return tokenizer


def tokenizer_config(max_position: int) -> dict[str, Any]:
    """tokenizer_config.json. No token is added around encoded text: the chat template writes them all."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": max_position,
        "clean_up_tokenization_spaces": False,
        "processor_class": "MiniMaxM3VLProcessor",
    }


def write(folder: Path, vocab: int, max_position: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    train(vocab).save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(max_position), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
