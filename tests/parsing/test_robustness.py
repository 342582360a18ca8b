"""Whatever arrives: no exception, no dependence on the cut, valid JSON from calls that ended, linear time."""

from __future__ import annotations

import gc
import itertools
import json
import random
import time
import tracemalloc

import pytest

from sglang_m3.parsing.events import CallArguments, CallEnd
from sglang_m3.parsing.parser import CallReader, Parser, ThinkingReader
from tests.parsing.transcripts import HEAD, TAIL, TRANSCRIPTS
from tests.parsing.writing import FUNCTIONS, NS, arguments, content, joined, ns, read, reasoning

LONG = 20_000
"""Characters of the shorter reply whose time is compared with one five times as long."""
TIMED = 60
"""Of so many mutated replies, the time of one is taken when it is repeated."""
PARTS = [
    "~",
    "<",
    ">",
    "</",
    "/",
    "]",
    "[",
    "]<]",
    "<mm:think>",
    "</mm:think>",
    "~<tool_call>",
    "~</tool_call>",
    " ",
    "\n",
    "x",
]
PARTS += [
    '~<invoke name="plan">',
    '~<invoke name="write">',
    '~invoke name="now">',
    '~<invoke name="rm">',
    "~</invoke>",
    '"',
]
PARTS += [f"~<{c}{name}>" for c in ("", "/") for name in ("path", "tags", "steps", "item", "title", "other")]


def mutated(chance: random.Random) -> str:
    """Pieces of golden replies, with pieces doubled, dropped, moved and replaced by markup."""
    text = "".join(chance.choice(TRANSCRIPTS).text for _ in range(chance.randint(0, 2)))
    for _ in range(chance.randint(1, 12)):
        start, end = sorted(chance.randrange(len(text) + 1) for _ in range(2))
        end = min(end, start + chance.choice([0, 1, 5, 30]))
        part = chance.choice([ns(chance.choice(PARTS)), text[start:end] * 2, "", text[end:][:20]])
        text = text[:start] + part + text[end:]
    return text


def check(text: str, chance: random.Random) -> None:
    thinking, undeclared = chance.random() < 0.5, chance.random() < 0.5
    expected = read([text], thinking=thinking, undeclared=undeclared)
    assert read(text, thinking=thinking, undeclared=undeclared) == expected
    cut = chance.randrange(len(text) + 1)
    assert read([text[:cut], text[cut:]], thinking=thinking, undeclared=undeclared) == expected
    texts = arguments(expected)
    for event in expected:
        if isinstance(event, CallEnd):
            assert isinstance(json.loads(texts[event.index]), dict)
    splitter = ThinkingReader(FUNCTIONS, thinking=thinking)
    parted = [*splitter.feed(text), *splitter.close()]
    reader = CallReader(FUNCTIONS, undeclared=undeclared)
    found = joined([*reader.feed(content(parted)), *reader.close()])
    assert reasoning(parted) == reasoning(expected)
    assert content(found) == content(expected)
    assert arguments(found) == texts


@pytest.mark.parametrize("limit", [2, pytest.param(60, marks=pytest.mark.long)], ids="{} s".format)
def test_mutated_replies(limit):
    # The long search is another one each time; a failure's note has the reply.
    chance = random.Random(20 if limit == 2 else None)
    deadline = time.monotonic() + limit
    for count in itertools.count():
        if time.monotonic() > deadline:
            break
        text = mutated(chance)
        try:
            check(text, chance)
            if text and count % TIMED == 0:
                check_time("", text, 97)
        except Exception as error:
            error.add_note(f"reply: {text!r}")
            raise


def check_time(start: str, body: str, size: int) -> None:
    """Whether five times the text takes about five times as long; the machine may be busy with others."""
    short = start + body * (LONG // len(body))
    long = start + body * (5 * LONG // len(body))
    for _ in range(3):
        quick = min(seconds(short, size) for _ in range(2))
        slow = seconds(long, size)
        if slow < 9 * quick + 0.03:
            return
    raise AssertionError(f"{quick:.3f} s for {len(short)} characters, {slow:.3f} s for {len(long)}")


def seconds(text: str, size: int) -> float:
    parser = Parser(FUNCTIONS, thinking=False, undeclared=True)
    gc.disable()  # a full collection costs what the rest of the process holds
    start = time.process_time()
    for at in range(0, len(text), size):
        parser.feed(text[at : at + size])
    parser.close()
    elapsed = time.process_time() - start
    gc.enable()
    return elapsed


REPEATED = {
    "prose": "word ",
    "namespaces": "~",
    "openers": "~<tool_call>",
    "headers": '~<tool_call>~<invoke name="',
    "whitespace": " ",
    "gaps": "~   ",
    "calls": '~<tool_call>~<invoke name="now">~</invoke>~</tool_call>',
    "thinking": "<mm:think>x</mm:think>y",
    "brackets": "]<]minimax[>",
}
INSIDE = {
    "text": ("~<content>", "word\n"),
    "markup in text": ("~<content>", "~</conten>"),
    "array": ("~<tags>", "~<item>x~</item>"),
    "depth": ("", "~<a>"),
    "undeclared": ("~<x>", "word~"),
    "alternating": ("", "~<tags>x~</tags>~<other>y~</other>"),
    "strays": ("", "~</z> "),
    "elided": ("~", "word"),
    "unclaimed": ("", "word ~<mode>1~</mode>"),
    "endless tag": ("~<", "a"),
}
HOSTILE = [(name, "", body) for name, body in REPEATED.items()]
HOSTILE += [(name, HEAD + start, body) for name, (start, body) in INSIDE.items()]


@pytest.mark.parametrize(("start", "body"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
@pytest.mark.parametrize("size", [97, LONG])
def test_time_is_linear(start, body, size):
    check_time(ns(start), ns(body), size)


@pytest.mark.parametrize("kilobytes", [128, pytest.param(1024, marks=pytest.mark.long)], ids="{} kB".format)
def test_a_large_argument_one_character_at_a_time(kilobytes):
    lines = "0123456789abcde\n" * (kilobytes << 6)
    text = HEAD + ns("~<content>") + lines + ns("~</content>") + TAIL
    start = time.process_time()
    parser = Parser(FUNCTIONS, thinking=False)
    received = sum(len(e.json_delta) for c in text for e in parser.feed(c) if isinstance(e, CallArguments))
    parser.close()
    elapsed = time.process_time() - start
    assert received == len(json.dumps({"content": lines}))
    assert elapsed < 30 * kilobytes / 1024, f"{elapsed:.1f} s"


def test_text_arguments_are_not_kept():
    reader = Parser(FUNCTIONS, thinking=False)
    reader.feed(HEAD + ns("~<content>"))
    piece = "x" * 1000
    tracemalloc.start()
    for _ in range(1000):
        reader.feed(piece)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 100_000, f"{kept} bytes"


def test_text_arguments_arrive_as_they_are_written():
    parser = Parser(FUNCTIONS, thinking=False)
    parser.feed(HEAD + ns("~<content>"))
    assert parser.feed("one ") == [CallArguments(0, "one ")]
    assert parser.feed("two ]<]mini") == [CallArguments(0, "two ")]
    assert parser.feed("mum") == [CallArguments(0, "]<]minimum")]


def test_nothing_follows_the_end():
    parser = Parser(FUNCTIONS, thinking=False)
    parser.close()
    with pytest.raises(AssertionError):
        parser.feed("more")


def test_the_namespace_is_the_vocabularys():
    assert NS == "]<]minimax[>["
