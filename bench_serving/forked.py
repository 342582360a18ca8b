"""Run jobs in forked processes with one limit for all: compiling kernels ahead on every core."""

from __future__ import annotations

import os
import select
import signal
import struct
import time
from collections.abc import Callable, Sequence

_NUMBER = struct.Struct("<I")
_LONGEST_REASON = 400
"""Bytes of a report that a pipe passes on in one piece."""


def run_forked(jobs: Sequence[Callable[[], object]], processes: int, seconds: float) -> list[str]:
    """Run every job once in one of `processes` children of this process, the first jobs first.

    Children begin as copies of this process, which must not have used its GPU: CUDA does not survive a fork.
    What they print is dropped. After `seconds` those that still run are killed; their children are not, so
    a compiler may end a little later.

    Returns:
        For every job "" if it returned, else why not: the exception, or that its process died or was killed.
    """
    tickets, reports = os.pipe(), os.pipe()
    for number in range(len(jobs)):
        os.write(tickets[1], _NUMBER.pack(number))
    os.close(tickets[1])
    children = [_fork(jobs, tickets[0], reports) for _ in range(min(processes, len(jobs)))]
    os.close(tickets[0])
    os.close(reports[1])
    end = time.monotonic() + seconds
    lines = _read_until(reports[0], end)
    os.close(reports[0])
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    outcomes = [f"not begun in {seconds:g} s"] * len(jobs)
    for line in lines:
        number, _, outcome = line.partition(" ")
        outcomes[int(number)] = outcome
    return [f"did not end in {seconds:g} s" if outcome == _BEGUN else outcome for outcome in outcomes]


_BEGUN = "begun"


def _fork(jobs: Sequence[Callable[[], object]], tickets: int, reports: tuple[int, int]) -> int:
    """Start a child that takes jobs until none is left; returns its process id to the parent."""
    child = os.fork()
    if child != 0:
        return child
    try:
        os.close(reports[0])
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        while ticket := os.read(tickets, _NUMBER.size):
            (number,) = _NUMBER.unpack(ticket)
            _report(reports[1], number, _BEGUN)
            _report(reports[1], number, _outcome(jobs[number]))
    finally:
        os._exit(0)


def _outcome(job: Callable[[], object]) -> str:
    try:
        job()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _report(pipe: int, number: int, outcome: str) -> None:
    line = f"{number} {' '.join(outcome.split())}".encode()[:_LONGEST_REASON]
    os.write(pipe, line + b"\n")


def _read_until(pipe: int, end: float) -> list[str]:
    """Lines until every writer has closed the pipe, or the time has come."""
    received = bytearray()
    while (left := end - time.monotonic()) > 0:
        if not select.select([pipe], [], [], left)[0]:
            break
        part = os.read(pipe, 65536)
        if not part:
            break
        received += part
    return received.decode(errors="replace").splitlines()
