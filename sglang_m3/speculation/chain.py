"""Drafts of SGLang's NGRAM speculation as chains, which M3's sparse layers can verify exactly.

A tree's tokens lie in slots in the order of the tree, so two siblings would be in each other's blocks; in a
chain, slots, positions and blocks agree as they do in decoding. SGLang fills a short draft up with siblings
of its first token, so even a draft of breadth 1 is a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_chains_only = False


def require_chains() -> None:
    """From now on every draft of this process, whose model is M3, is a chain."""
    global _chains_only
    _chains_only = True


def longest_chain(tokens: np.ndarray, ancestors: np.ndarray) -> np.ndarray:
    """The longest path of a draft tree, filled up to its size.

    Args:
        tokens: `[n]`; the first is the root.
        ancestors: `[n, n]`, `ancestors[i, j]`: j is i or above it. Parents come before children.

    Returns:
        `[n]`: the path from the root, the first one of equal length, then token 0. What stands behind the
        path is a guess like any other: verification accepts it only where the model says the same.
    """
    depth = ancestors.astype(bool).sum(axis=1)
    path = np.flatnonzero(ancestors[int(depth.argmax())])
    chain = np.zeros_like(tokens)
    chain[: len(path)] = tokens[path]
    return chain


def around_batch_get(
    original: Callable[..., tuple[np.ndarray, np.ndarray]],
    corpus: Any,
    req_ids: Sequence[str],
    *args: Any,
    **kwargs: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Around `NgramCorpus.batch_get`: tokens `[R * n]` and masks `[R * n * n]`, for M3 those of chains."""
    tokens, masks = original(corpus, req_ids, *args, **kwargs)
    if not _chains_only:
        return tokens, masks
    size = corpus.draft_token_num
    trees = zip(tokens.reshape(-1, size), masks.reshape(-1, size, size), strict=True)
    chains = [longest_chain(tree, ancestors) for tree, ancestors in trees]
    causal = np.tril(np.ones((size, size), dtype=masks.dtype))
    return np.concatenate(chains), np.tile(causal.reshape(-1), len(chains))
