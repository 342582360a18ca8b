"""Every rule of the grammar, however the reply arrives."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from sglang_m3.parsing.events import CallArguments, CallEnd, CallStart, Event, Reasoning
from sglang_m3.parsing.parser import CallReader, ThinkingReader
from tests.parsing.transcripts import HEAD, TRANSCRIPTS, Transcript
from tests.parsing.writing import FUNCTIONS, NS, arguments, calls, content, joined, ns, read, reasoning

RANDOM_CUTS = 20


def whole(transcript: Transcript) -> list[Event]:
    return read([transcript.text], thinking=transcript.thinking, undeclared=transcript.undeclared)


def cuttings(text: str) -> Iterator[list[str]]:
    """Every cut into two, one character at a time, and random cuts."""
    yield from ([text[:at], text[at:]] for at in range(1, len(text)))
    yield list(text)
    chance = random.Random(len(text))
    for _ in range(RANDOM_CUTS):
        ends = sorted({chance.randrange(len(text) + 1) for _ in range(chance.randrange(2, 12))} | {len(text)})
        yield [text[start:end] for start, end in zip([0, *ends], ends)]


every = pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda t: t.rule.replace(" ", "-"))


@every
def test_rule(transcript):
    events = whole(transcript)
    assert reasoning(events) == transcript.reasoning
    assert content(events) == transcript.content
    assert calls(events) == list(transcript.calls)
    assert len(arguments(events)) == len(transcript.calls) + transcript.cut_off


@every
def test_cuts_do_not_matter(transcript):
    expected = whole(transcript)
    for pieces in cuttings(transcript.text):
        cut = read(pieces, thinking=transcript.thinking, undeclared=transcript.undeclared)
        assert cut == expected, pieces


@every
def test_two_readers_in_a_row_are_the_parser(transcript):
    """SGLang's reasoning detector reads a whole reply before the tool detector sees the rest."""
    thinking = ThinkingReader(FUNCTIONS, thinking=transcript.thinking)
    parted = [*thinking.feed(transcript.text), *thinking.close()]
    reader = CallReader(FUNCTIONS, undeclared=transcript.undeclared)
    read_calls = [*reader.feed(content(parted)), *reader.close()]
    expected = whole(transcript)
    assert reasoning(parted) == reasoning(expected)
    assert joined(read_calls) == joined(event for event in expected if not isinstance(event, Reasoning))


@every
def test_truncation_loses_nothing_and_claims_nothing(transcript):
    full = whole(transcript)
    ended = [event.index for event in full if isinstance(event, CallEnd)]
    assert not lost(transcript.text, full)
    for length in range(len(transcript.text)):
        text = transcript.text[:length]
        events = read([text], thinking=transcript.thinking, undeclared=transcript.undeclared)
        assert [e.index for e in events if isinstance(e, CallEnd)] == ended[: len(calls(events))], text
        assert calls(events) == calls(full)[: len(calls(events))], text
        assert not lost(text, events), text


BEGUN = "|".join(re.escape(NS[:length]) for length in range(1, len(NS)))
MARKUP = re.compile(
    rf'{re.escape(NS)}\s*(?:<?invoke name="[^"<\n]*">|</?[^<>\n]*>|\w+>|<[^<>\n]*\Z|)'
    rf"|</?mm:think>|(?:{BEGUN})\Z"
)


def lost(text: str, events: list[Event]) -> Counter[str]:
    """Characters of the text, but for markup and whitespace, that no event has."""
    found = reasoning(events) + content(events)
    for arguments_text in arguments(events).values():
        # The arguments of a call that was cut off are the beginning of JSON.
        found += re.sub(r"\\(?:u[0-9a-f]{4}|.)", lambda escape: json.loads(f'"{escape[0]}"'), arguments_text)
    return Counter("".join(MARKUP.sub("", text).replace("007", "7").split())) - Counter(found)


@every
def test_the_events_of_a_call_are_neighbours_and_in_order(transcript):
    open_call = None
    for event in whole(transcript):
        if isinstance(event, CallStart):
            assert open_call is None
            open_call = event.index
        elif isinstance(event, CallArguments | CallEnd):
            assert open_call == event.index
            open_call = None if isinstance(event, CallEnd) else open_call
        else:
            assert open_call is None or transcript.cut_off, event
    assert (open_call is not None) == transcript.cut_off


@pytest.mark.parametrize(
    ("name", "arguments_text", "expected"),
    [
        ("write", "~<tags>~<item>a~</item>~<item>b", '{"tags": ["a", "b'),
        ("write", "~<tags>a~</tags>~<tags>b", '{"tags": ["a"], "tags": "b'),
        ("write", "~<mode>12", '{"mode": "12'),
        ("write", "~<content>a~</content>~<tags>~<it", '{"content": "a", "tags": "]<]minimax[>[<it'),
        ("write", "~<path>a~</path>~<pa", '{"path": "a"'),
        ("plan", "~<steps>~<item>~<title>a~</title>~<done>tr", '{"steps": [{"title": "a", "done": "tr'),
        ("plan", "~<limits>~<cost>1~</cost>", '{"limits": {"cost": 1'),
        ("now", '~<x>~<item>a~</item>~<y>"', '{"x": {"item": "a", "y": "\\"'),
    ],
)
def test_what_a_cut_off_call_held_back_begins_its_json(name, arguments_text, expected):
    head = HEAD.replace("write", name)
    assert arguments(read([head + ns(arguments_text)])) == {0: expected}


def test_the_open_call_is_located():
    for transcript in TRANSCRIPTS:
        reader = CallReader(FUNCTIONS, undeclared=True)
        for character in transcript.text:
            reader.feed(character)
        reader.close()
        start = reader.open_call
        assert (start is not None) == transcript.cut_off, transcript.rule
        assert start is None or transcript.text[start:].startswith(f"{NS}<tool_call>")
