"""Workload files mean what they say, and wrong ones are refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench_serving import workload
from bench_serving.workload import PrefixLevel, Traffic, Workload, WorkloadError

PROMISED = {"agentic-60k", "tool-loop", "fan-out", "tree", "private-long", "mixed", "million"}


def test_the_promised_workloads_are_there() -> None:
    assert set(workload.names()) >= PROMISED


@pytest.mark.parametrize("name", workload.names())
def test_every_workload_loads_and_says_what_it_is(name: str) -> None:
    load = workload.load(name)
    assert load.name == name and load.description.endswith(".")
    for variation in load.variations():
        assert not variation.prefix_tokens_sweep and not variation.shared_share_sweep


def test_the_agentic_workload_is_the_one_that_numbers_are_promised_for() -> None:
    load = workload.load("agentic-60k")
    assert load.concurrency == (1, 8, 16, 32, 64)
    assert load.prefix == (PrefixLevel(60_000),)
    assert load.traffic == (Traffic((200, 1000), (20, 300)),)


def test_private_long_shares_nothing_and_million_reaches_a_million() -> None:
    assert workload.load("private-long").prefix == ()
    last = workload.load("million").variations()[-1]
    assert 1_000_000 - 10_000 <= last.prefix_tokens + last.traffic[0].input_tokens[1] <= 1_000_000


KIND = "[[traffic]]\ninput_tokens = [1, 2]\noutput_tokens = [1, 2]\n"
WRONG = {
    "unknown field": (f"concurrency = [1]\nwhat = 2\n{KIND}", "what"),
    "unknown traffic field": (f"concurrency = [1]\n{KIND}inputs = 3", "inputs"),
    "missing field": ("concurrency = [1]\n[[traffic]]\ninput_tokens = [1, 2]", "output_tokens"),
    "no traffic": ("concurrency = [1]", "traffic"),
    "backward range": (f"concurrency = [1]\n{KIND.replace('1, 2', '3, 2', 1)}", "range"),
    "zero concurrency": (f"concurrency = [0]\n{KIND}", "concurrency"),
    "branches with turns": (f"concurrency = [1]\n{KIND}branches = 2\nturns = [2, 2]", "branches"),
    "sweep without a prefix": (f"concurrency = [1]\nshared_share_sweep = [0.5]\n{KIND}", "prefix"),
    "no TOML": ("concurrency = [1", r"load\.toml is no readable TOML: Unclosed array"),
    "one number": (f"concurrency = 8\n{KIND}", "concurrency must be a list of whole numbers, not 8"),
    "text for numbers": (f'concurrency = ["8"]\n{KIND}', "concurrency must be a list of whole numbers"),
    "half a session": (f"concurrency = [1.5]\n{KIND}", r"concurrency must be a list of whole.*\[1\.5\]"),
    "no range": (
        f"concurrency = [1]\n{KIND}turns = [1, 2, 3]",
        r"turns must be a list of two whole numbers, not \[1, 2, 3\]",
    ),
    "truth for a number": (f"concurrency = [1]\n{KIND}share = true", "share must be a number, not True"),
    "number for a truth": (f"concurrency = [1]\n{KIND}shared_prefix = 1", "must be a truth value"),
    "traffic that is no table": ("concurrency = [1]\ntraffic = 3", r"traffic is given in tables \[\[traffic"),
}


@pytest.mark.parametrize(("text", "named"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_refused_by_name(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "load.toml"
    path.write_text(f'description = "x."\n{text}')
    with pytest.raises(WorkloadError, match=named):
        workload.load(str(path))


def test_a_file_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "load.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(WorkloadError, match=r"load\.toml is no readable TOML"):
        workload.load(str(path))


def test_whole_numbers_may_stand_for_others_and_a_description_may_lack(tmp_path: Path) -> None:
    path = tmp_path / "load.toml"
    path.write_text(
        f"concurrency = [1]\nshared_share_sweep = [0, 1]\n[[prefix]]\ntokens = 1\n{KIND}share = 2"
    )
    load = workload.load(str(path))
    assert (load.name, load.description, load.shared_share_sweep) == ("load", "", (0, 1))
    assert load.traffic[0].share == 2


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(WorkloadError, match="agentic-60k"):
        workload.load("agentic")


def test_scaling_changes_every_length_and_keeps_zero() -> None:
    load = workload.load("tool-loop").scaled(0.01)
    assert load.prefix == (PrefixLevel(40),)
    (kind,) = load.traffic
    assert kind.first_input_tokens == (20, 80) and kind.input_tokens == (2, 20)
    assert workload.load("agentic-60k").scaled(0.001).traffic[0].first_input_tokens == (0, 0)


def test_the_digest_changes_with_the_requests_alone() -> None:
    load = workload.load("agentic-60k")
    assert replace(load, concurrency=(3,), description="another").digest == load.digest
    for other in (load.scaled(0.5), replace(load, requests_per_slot=5), replace(load, shared_share=0.5)):
        assert other.digest != load.digest


def test_a_prefix_sweep_scales_every_level() -> None:
    base = Workload("x", "x.", (1,), (Traffic((1, 1), (1, 1)),), (PrefixLevel(300), PrefixLevel(100, 2)))
    assert base.with_prefix_tokens(200).prefix == (PrefixLevel(150), PrefixLevel(50, 2))
