"""The selection bench: its cases' sharing and floors, and what is compiled before it times anything."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench_serving import operators_selection as bench
from bench_serving.operators_selection import Case, cases, compile_jobs


def test_every_case_is_compiled_ahead_and_sglangs_where_it_is_timed() -> None:
    measured = list(cases())
    jobs = compile_jobs(measured, True)
    ours = [case for job in jobs if not job.theirs for case in job.needed_by]
    theirs = {case for job in jobs if job.theirs for case in job.needed_by}
    assert sorted(map(repr, ours)) == sorted(map(repr, measured)), "each case once"
    assert theirs == {case for case in measured if case.table_requests == 0}
    assert not any(job.theirs for job in compile_jobs(measured, False))


def test_an_extend_step_of_sglangs_needs_every_configuration() -> None:
    step = next(case for case in cases() if case.new == 512)
    count = sum(step in job.needed_by for job in compile_jobs(list(cases()), True) if job.theirs)
    assert count == bench.PEER_CONFIGURATIONS


def test_one_decode_step_of_sglangs_comes_first_and_the_others_last() -> None:
    jobs = compile_jobs(list(cases()), True)
    decode = [number for number, job in enumerate(jobs) if job.theirs and job.needed_by[0].new == 1]
    assert decode[0] == 0
    assert decode[1:] == list(range(len(jobs) - len(decode) + 1, len(jobs)))


def test_a_table_shares_what_the_case_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "DEVICE", torch.device("cpu"))
    case = Case("", 1, 17, 1, 20 * 128, 2 * 128 - 1, 5 * 128)
    table, pages = case.page_table()
    assert table.shape == (17, 20) and pages == table.unique().numel() == 13 + 3 * 5 + 17 * 2
    assert (table[:, :13] == table[0, :13]).all()
    for first, second in ((0, 7), (8, 15), (7, 8), (15, 16)):
        same = (table[first] == table[second]).sum().item()
        assert same == (18 if first // 8 == second // 8 else 13), f"requests {first} and {second}"


def test_a_floor_is_the_pages_once_or_the_products_once() -> None:
    decode = Case("", 4, 8, 1, 65536, 512)
    assert decode.floor_us(1000) == pytest.approx(1000 * 128 * 128 * 2 / 4.3e6)
    extend = dataclasses.replace(decode, batch=1, new=4096, context=8192)
    visible = sum(range(4097, 8193))
    assert extend.floor_us(64) == pytest.approx(2 * 128 * 4 * visible / 790e6)
