"""The requests of a measured point, made from a workload, a corpus and a seed."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from bench_serving.corpus import Corpus
from bench_serving.workload import PrefixLevel, Traffic, Workload

PAGE_TOKENS = 128
"""Tokens of a radix cache page of M3: only whole pages can be shared."""


@dataclass(frozen=True)
class Turn:
    """What a turn adds.

    Attributes:
        branches: token ids that each of the turn's requests appends to the session so far; one, but for
            fan-out.
        output_tokens: tokens to generate in each.
        think_seconds: pause before the turn.
    """

    branches: tuple[tuple[int, ...], ...]
    output_tokens: int
    think_seconds: float


@dataclass(frozen=True)
class Session:
    """Requests that follow each other.

    Attributes:
        key: position in the point's list; the same request has the same key in every variant.
        opening: token ids before the first turn's own: the shared prefix and the private start.
        shared_tokens: how many of them come from the prefix tree.
    """

    key: int
    opening: tuple[int, ...]
    shared_tokens: int
    turns: tuple[Turn, ...]

    @property
    def requests(self) -> int:
        return sum(len(turn.branches) for turn in self.turns)

    @property
    def private_tokens(self) -> int:
        """Of the prompts, those that are the session's own."""
        branches = (branch for turn in self.turns for branch in turn.branches)
        return len(self.opening) - self.shared_tokens + sum(map(len, branches))


@dataclass(frozen=True)
class PrefixTree:
    """The shared texts of a workload: `paths` lists every way from the root to a leaf, as token ids."""

    paths: tuple[tuple[int, ...], ...]


def prefix_tree(workload: Workload, corpus: Corpus, seed: int) -> PrefixTree:
    """The prefix tree; depends on the workload's levels and the seed alone, not on the point."""
    generator = random.Random(f"prefix {seed}")
    paths: list[tuple[int, ...]] = [()]
    for level in workload.prefix:
        length = _shared_tokens(level, workload)
        paths = [(*path, *corpus.cut(length, generator)) for path in paths for _ in range(level.copies)]
    return PrefixTree(tuple(path for path in paths if path))


def sessions(
    workload: Workload, tree: PrefixTree, corpus: Corpus, *, count: int, seed: str
) -> tuple[Session, ...]:
    """`count` sessions. Equal arguments give equal sessions; other seeds give other private text.

    Kinds of traffic are dealt in a fixed order by their shares, so that a small count holds every kind.
    """
    generator = random.Random(f"sessions {seed}")
    kinds = _dealt(workload.traffic, count)
    made = []
    for key, kind in enumerate(kinds):
        shared = generator.choice(tree.paths) if kind.shared_prefix and tree.paths else ()
        # What a level does not share is as long in every request, but its own text.
        private = workload.prefix_tokens - len(shared) if kind.shared_prefix else 0
        private += generator.randint(*kind.first_input_tokens)
        turns = tuple(
            Turn(
                branches=tuple(
                    tuple(corpus.cut(generator.randint(*kind.input_tokens), generator))
                    for _ in range(kind.branches)
                ),
                output_tokens=generator.randint(*kind.output_tokens),
                think_seconds=generator.uniform(*kind.think_seconds) if turn else 0.0,
            )
            for turn in range(generator.randint(*kind.turns))
        )
        # One object where nothing is added: long prefixes are held, and encoded, once.
        opening = (*shared, *corpus.cut(private, generator)) if private else shared
        made.append(Session(key, opening, len(shared), turns))
    return tuple(made)


def other_text(point: Iterable[Session], corpus: Corpus, seed: str) -> tuple[Session, ...]:
    """Sessions of the same lengths, shared prefixes, answers and pauses, whose private text is another."""
    generator = random.Random(f"other text {seed}")
    made = []
    for session in point:
        private = len(session.opening) - session.shared_tokens
        opening = session.opening
        if private:
            opening = (*opening[: session.shared_tokens], *corpus.cut(private, generator))
        turns = tuple(
            replace(turn, branches=tuple(tuple(corpus.cut(len(ids), generator)) for ids in turn.branches))
            for turn in session.turns
        )
        made.append(replace(session, opening=opening, turns=turns))
    return tuple(made)


@dataclass(frozen=True)
class Overlap:
    """How much of the prompts could come from the cache, before any server is asked.

    Attributes:
        prompt_tokens: of all requests; a later turn counts its own earlier turns, but no generated token.
        shared_tokens: those in whole pages that an earlier request, or the warmed prefix tree, also holds.
    """

    prompt_tokens: int
    shared_tokens: int

    @property
    def fraction(self) -> float:
        return self.shared_tokens / max(1, self.prompt_tokens)


def overlap(tree: PrefixTree, point: Iterable[Session]) -> Overlap:
    """Prefix overlap of the point's requests in order, at the radix cache's page size."""
    seen: set[int] = set()
    for path in tree.paths:
        seen.update(_page_chain(path))
    prompt_tokens = shared_tokens = 0
    for session in point:
        so_far = session.opening
        for turn in session.turns:
            for branch in turn.branches:
                prompt = (*so_far, *branch)
                pages = _page_chain(prompt)
                prompt_tokens += len(prompt)
                shared_tokens += PAGE_TOKENS * sum(page in seen for page in pages)
                seen.update(pages)
            so_far = (*so_far, *turn.branches[0])
    return Overlap(prompt_tokens, shared_tokens)


def _page_chain(ids: tuple[int, ...]) -> list[int]:
    """One hash per whole page, of the page and everything before it."""
    chain, value = [], 0
    for begin in range(0, len(ids) - PAGE_TOKENS + 1, PAGE_TOKENS):
        value = hash((value, ids[begin : begin + PAGE_TOKENS]))
        chain.append(value)
    return chain


def _shared_tokens(level: PrefixLevel, workload: Workload) -> int:
    return round(level.tokens * workload.shared_share)


def _dealt(traffic: tuple[Traffic, ...], count: int) -> list[Traffic]:
    """`count` kinds, each as often as its share says, evenly spread."""
    total = sum(kind.share for kind in traffic)
    given = [0.0] * len(traffic)
    dealt = []
    for number in range(1, count + 1):
        behind = [number * kind.share / total - done for kind, done in zip(traffic, given)]
        chosen = max(range(len(traffic)), key=lambda index: behind[index])
        given[chosen] += 1
        dealt.append(traffic[chosen])
    return dealt
