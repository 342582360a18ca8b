"""The markers of M3's prompts and their places in a tiny vocabulary."""

from __future__ import annotations

BOS = "]~!b["
EOS = "[e~["
PAD = "]!p~["
ROLE = "]~b]"
IMAGE = "]<]image[>["
VIDEO = "]<]video[>["
VISION_START = "]<]start of image[>["
VISION_END = "]<]end of image[>["
NAMESPACE = "]<]minimax[>["
THINK_START = "<mm:think>"
THINK_END = "</mm:think>"

SPECIAL = (PAD, ROLE, EOS, IMAGE, VIDEO, VISION_START, VISION_END, BOS)
"""Markers that decoding drops under `skip_special_tokens`."""

VISIBLE = (THINK_START, THINK_END, NAMESPACE)
"""Markers that stay in decoded text, since the reasoning and tool-call parsers read them there."""

MARKERS = SPECIAL + VISIBLE
"""All markers, one token each, in id order. They take the highest ids of the vocabulary."""


def token_id(marker: str, vocab: int) -> int:
    """Id of one of `MARKERS` in a vocabulary of `vocab` tokens."""
    return vocab - len(MARKERS) + MARKERS.index(marker)
