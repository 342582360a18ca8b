"""Sessions are seeded, share what the workload says, and their overlap is counted right."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from bench_serving import workload
from bench_serving.corpus import RandomCorpus, TextCorpus
from bench_serving.sessions import (
    PAGE_TOKENS,
    PrefixTree,
    Session,
    Turn,
    overlap,
    prefix_tree,
    sessions,
)
from bench_serving.workload import PrefixLevel, Traffic, Workload

CORPUS = TextCorpus(tuple(random.Random(3).choices(range(5000), k=40_009)))


def made(
    load: Workload, *, count: int = 9, label: str = "a", seed: int = 0
) -> tuple[PrefixTree, tuple[Session, ...]]:
    tree = prefix_tree(load, CORPUS, seed)
    return tree, sessions(load, tree, CORPUS, count=count, seed=label)


def test_equal_seeds_give_equal_requests_and_others_differ_in_private_text_alone() -> None:
    load = workload.load("agentic-60k").scaled(0.01)
    tree, first = made(load)
    assert (tree, first) == made(load)
    other_tree, other = made(load, label="b")
    assert tree == other_tree
    assert {session.turns for session in first}.isdisjoint(session.turns for session in other)
    assert {session.opening for session in first} == {tree.paths[0]}


def test_another_seed_gives_another_prefix() -> None:
    load = workload.load("agentic-60k").scaled(0.01)
    assert made(load)[0] != made(load, seed=1)[0]


def test_lengths_stay_in_their_ranges() -> None:
    load = workload.load("tool-loop").scaled(0.1)
    (kind,) = load.traffic
    for session in made(load, count=20)[1]:
        private = len(session.opening) - session.shared_tokens
        assert kind.first_input_tokens[0] <= private <= kind.first_input_tokens[1]
        assert kind.turns[0] <= len(session.turns) <= kind.turns[1]
        assert session.turns[0].think_seconds == 0
        for turn in session.turns:
            assert kind.input_tokens[0] <= len(turn.branches[0]) <= kind.input_tokens[1]
            assert kind.output_tokens[0] <= turn.output_tokens <= kind.output_tokens[1]


def test_a_tree_has_a_path_for_every_leaf_and_its_levels_are_shared() -> None:
    load = workload.load("tree").scaled(0.1)
    tree = prefix_tree(load, CORPUS, 0)
    assert len(tree.paths) == 12
    assert len({path[:400] for path in tree.paths}) == 1
    assert sorted(Counter(path[:2400] for path in tree.paths).values()) == [3, 3, 3, 3]
    assert {len(path) for path in tree.paths} == {3000}


def test_branches_of_a_fan_out_differ_at_their_end_alone() -> None:
    for session in made(workload.load("fan-out").scaled(0.1), count=4)[1]:
        (turn,) = session.turns
        assert len(turn.branches) == session.requests == 8
        assert len(set(turn.branches)) > 1


def test_kinds_of_traffic_come_in_their_shares() -> None:
    load = workload.load("mixed").scaled(0.01)
    cold = [session for session in made(load, count=40)[1] if not session.shared_tokens]
    assert len(cold) == 8
    assert any(not session.shared_tokens for session in made(load, count=5)[1])


def test_sharing_less_keeps_the_context_length() -> None:
    load = replace(workload.load("sharing-sweep").scaled(0.05), shared_share_sweep=(0.0, 0.25, 1.0))
    for variation in load.variations():
        for session in made(variation)[1]:
            assert len(session.opening) == load.prefix_tokens
            assert session.shared_tokens == round(load.prefix_tokens * variation.shared_share)


def test_text_longer_than_the_corpus_goes_on_at_its_start() -> None:
    corpus = TextCorpus((1, 2, 3, 4, 5))
    cut = corpus.cut(13, random.Random(1))
    assert len(cut) == 13
    assert all(later == (earlier % 5) + 1 for earlier, later in itertools.pairwise(cut))


def test_random_ids_stay_below_the_vocabulary() -> None:
    cut = RandomCorpus(17).cut(500, random.Random(1))
    assert len(cut) == 500 and set(cut) == set(range(17))


def brute_force(tree: PrefixTree, point: tuple[Session, ...]) -> tuple[int, int]:
    """Prompt and shared tokens, by comparing every prompt with every earlier one token by token."""
    earlier: list[tuple[int, ...]] = list(tree.paths)
    prompts = shared = 0
    for session in point:
        so_far = session.opening
        for turn in session.turns:
            for branch in turn.branches:
                prompt = (*so_far, *branch)
                best = 0
                for other in earlier:
                    same = 0
                    while same < min(len(prompt), len(other)) and prompt[same] == other[same]:
                        same += 1
                    best = max(best, same // PAGE_TOKENS * PAGE_TOKENS)
                prompts += len(prompt)
                shared += best
                earlier.append(prompt)
            so_far = (*so_far, *turn.branches[0])
    return prompts, shared


lengths = st.integers(1, 300)


@settings(max_examples=40, deadline=None)
@given(
    prefix=st.lists(st.tuples(lengths, st.integers(1, 3)), max_size=3),
    first=st.integers(0, 200),
    new=lengths,
    turns=st.integers(1, 3),
    branches=st.integers(1, 3),
    share=st.sampled_from([0.0, 0.4, 1.0]),
    count=st.integers(1, 4),
)
def test_overlap_is_what_comparing_all_prompts_finds(
    prefix: list[tuple[int, int]], first: int, new: int, turns: int, branches: int, share: float, count: int
) -> None:
    kind = Traffic(
        (new, new),
        (1, 1),
        first_input_tokens=(first, first),
        turns=(turns, turns) if branches == 1 else (1, 1),
        branches=branches,
    )
    levels = tuple(PrefixLevel(tokens, copies) for tokens, copies in prefix)
    load = Workload("x", "x.", (1,), (kind,), levels, shared_share=share)
    tree, point = made(load, count=count)
    found = overlap(tree, point)
    assert (found.prompt_tokens, found.shared_tokens) == brute_force(tree, point)


def test_overlap_of_nothing_is_zero() -> None:
    alone = Session(0, (), 0, (Turn(((1, 2, 3),), 1, 0.0),))
    assert overlap(PrefixTree(()), [alone]).fraction == 0
    assert overlap(PrefixTree(()), []).fraction == 0
