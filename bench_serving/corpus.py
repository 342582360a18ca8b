"""Token ids to build prompts from: real text, or random ids."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Corpus(Protocol):
    """A source of token ids."""

    def cut(self, tokens: int, generator: random.Random) -> list[int]:
        """`tokens` ids, from another place for every state of `generator`."""


@dataclass(frozen=True)
class TextCorpus:
    """Consecutive tokens of the Python standard library's source code, as the model's tokenizer reads it."""

    ids: tuple[int, ...]

    def cut(self, tokens: int, generator: random.Random) -> list[int]:
        begin = generator.randrange(len(self.ids))
        cut: list[int] = []
        while len(cut) < tokens:
            # Past the end it goes on at the start: a cut may be longer than the text.
            piece = self.ids[begin : begin + tokens - len(cut)]
            cut.extend(piece)
            begin = 0
        return cut


@dataclass(frozen=True)
class RandomCorpus:
    """Independent, uniform token ids below `vocab`: nothing in common with text, selection included."""

    vocab: int

    def cut(self, tokens: int, generator: random.Random) -> list[int]:
        return generator.choices(range(self.vocab), k=tokens)


def source_text(characters: int) -> Iterator[str]:
    """The standard library's source, file by file in name order, until there are so many characters."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(folder.rglob("*.py")) if "site-packages" not in path.parts]
    for path in files:
        if characters <= 0:
            return
        text = path.read_text(encoding="utf-8", errors="replace")[:characters]
        characters -= len(text)
        yield text


def text_corpus(tokenizer_path: str, *, characters: int) -> TextCorpus:
    """Tokenise about `characters` of source with the tokenizer of a model folder.

    Ids are plain text's: no special token is added.

    Raises:
        ValueError: there is no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=True)
    except (OSError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{tokenizer_path} has no tokenizer ({first}); --tokenizer names a folder that has one, "
            "--prompts random needs none"
        ) from error
    texts = list(source_text(characters))
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return TextCorpus(tuple(token for ids in encoded for token in ids))


def vocabulary(model_path: str) -> int:
    """Token ids that a model folder's config.json allows, markers at the top left out.

    Raises:
        ValueError: no config.json there that says.
    """
    path = Path(model_path) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return int(config.get("text_config", config)["vocab_size"]) * 9 // 10
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} does not say the vocabulary's size ({error!r}); --vocab does") from error
