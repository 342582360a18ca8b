"""Drafts of SGLang's n-gram corpus become chains for M3, and for M3 only."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_m3.speculation import chain

SIZE = 5
#     7        a tree of five nodes: 7 -> (3 -> 4 -> 5), 0
TOKENS = np.array([7, 3, 0, 4, 5], dtype=np.int64)
PARENTS = (-1, 0, 0, 1, 3)


def ancestors_of(parents: tuple[int, ...]) -> np.ndarray:
    mask = np.zeros((len(parents), len(parents)), dtype=np.uint8)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, node] = 1
    return mask


@pytest.fixture
def draft() -> tuple[np.ndarray, np.ndarray]:
    """Two requests: the tree, and one whose guesses are all filling."""
    star = np.array([9, 0, 0, 0, 0], dtype=np.int64)
    masks = np.stack([ancestors_of(PARENTS), ancestors_of((-1, 0, 0, 0, 0))])
    return np.concatenate([TOKENS, star]), masks.reshape(-1)


def get(draft: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    corpus = SimpleNamespace(draft_token_num=SIZE)
    return chain.around_batch_get(lambda *_: draft, corpus, ["a", "b"], [[1], [2]], [1, 1])


def test_m3_verifies_the_longest_path_as_a_chain(
    draft: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "_chains_only", False)
    chain.require_chains()
    tokens, masks = get(draft)
    assert tokens.tolist() == [7, 3, 4, 5, 0, 9, 0, 0, 0, 0]
    assert tokens.dtype == draft[0].dtype and masks.dtype == draft[1].dtype
    for mask in masks.reshape(2, SIZE, SIZE):
        assert np.array_equal(mask, np.tril(np.ones((SIZE, SIZE)))), mask


def test_other_models_keep_their_trees(
    draft: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "_chains_only", False)
    tokens, masks = get(draft)
    assert tokens is draft[0] and masks is draft[1]


@given(st.integers(0, 2**32 - 1), st.integers(1, 17))
def test_the_chain_is_a_path_of_the_tree_and_no_path_is_longer(seed: int, size: int) -> None:
    random = np.random.default_rng(seed)
    parents = tuple(-1 if node == 0 else int(random.integers(node)) for node in range(size))
    tokens = np.arange(10, 10 + size)
    got = [int(token) - 10 for token in chain.longest_chain(tokens, ancestors_of(parents)) if token]
    depth = [1] * size
    for node in range(1, size):
        depth[node] = depth[parents[node]] + 1
    assert len(got) == max(depth)
    assert [parents[node] for node in got] == [-1, *got[:-1]]
