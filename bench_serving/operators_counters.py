"""What limits the decode and extend operators: hardware counters of each of their kernels, by Nsight Compute.

    python -m bench_serving.operators_counters [--only SUBSTRING] [--csv FILE]

Runs every case once under `ncu`, which must be installed and allowed to read counters, and prints a table.
A kernel takes longer under `ncu` than in a graph: nothing precedes it, and the caches are flushed.
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SECTIONS = ("SpeedOfLight", "WarpStateStats", "SchedulerStats", "Occupancy", "LaunchStats")
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
RANGE_COLUMN = "Push/Pop_Range"
RANGE = re.compile(r'[^"]*"<default domain>:(.*?)(?::none)*"\s*')
"""A thread, and in quotes a range's domain, name and attributes, which ours have none of."""


@dataclass(frozen=True)
class Counters:
    """One kernel of one case.

    Attributes:
        microseconds: its duration.
        dram, l2, sm: parts of the peak throughput of memory, L2 cache and multiprocessors, in percent.
        occupancy: warps resident, in percent of what a multiprocessor holds.
        issued: cycles in which a scheduler issued an instruction, in percent.
        stalls: what warps waited for, most first: name, and warps waiting per instruction issued.
    """

    case: str
    kernel: str
    microseconds: float
    dram: float
    l2: float
    sm: float
    occupancy: float
    issued: float
    stalls: tuple[tuple[str, float], ...]

    def line(self) -> str:
        """A row of the table."""
        waits = ", ".join(f"{name} {warps:.1f}" for name, warps in self.stalls[:3])
        shares = (self.dram, self.l2, self.sm, self.occupancy, self.issued)
        percent = " | ".join(f"{share:.0f}%" for share in shares)
        return f"| {self.case} | `{self.kernel}` | {self.microseconds:.1f} | {percent} | {waits} |"


HEADER = """\
| case | kernel | us | DRAM | L2 | SM | warps resident | cycles that issue | waits (warps per instruction) |
|---|---|---|---|---|---|---|---|---|"""


def read(lines: list[str]) -> Iterator[Counters]:
    """The kernels in the output of `ncu --csv --page raw --nvtx`, whatever surrounds it.

    Raises:
        ValueError: there is no table in it.
    """
    begins = [number for number, line in enumerate(lines) if line.startswith('"ID"')]
    if not begins:
        raise ValueError("ncu printed no table; its last lines:\n" + "\n".join(lines[-15:]))
    table = csv.DictReader(lines[begins[0] :])
    for row in table:
        if not (row["ID"] or "").isdigit():
            # The second line holds units.
            continue

        def value(name: str, row: dict[str, str] = row) -> float:
            return float(row[name].replace(",", ""))

        stalls = sorted(
            (
                (found[1], value(name))
                for name in row
                if name and (found := STALL.fullmatch(name)) and row[name]
            ),
            key=lambda stall: -stall[1],
        )
        ranges = [text for name, text in row.items() if name and RANGE_COLUMN in name and text]
        yield Counters(
            case=RANGE.fullmatch(ranges[0])[1] if ranges else "",
            kernel=row["Kernel Name"].split("(")[0],
            microseconds=value("gpu__time_duration.sum") / 1e3,
            dram=value("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"),
            l2=value("lts__throughput.avg.pct_of_peak_sustained_elapsed"),
            sm=value("sm__throughput.avg.pct_of_peak_sustained_elapsed"),
            occupancy=value("sm__warps_active.avg.pct_of_peak_sustained_active"),
            issued=100 * value("smsp__issue_active.avg.per_cycle_active"),
            stalls=tuple(stalls),
        )


def cases() -> Iterator[tuple[str, Callable[[], Callable[[], object]]]]:
    """Names, and what makes a call that runs the case once."""
    from bench_serving import operators_attention as attention
    from bench_serving import operators_selection as selection

    for case in selection.cases():
        if (case.phase_is_decode and case.context == 65536) or case.new == 512:
            name = f"choose: {case.name}, {case.heads} heads, batch {case.batch}, {case.new} new"
            yield name, lambda case=case: selection.prepared(case).choose_once
    for case in attention.EXTEND + attention.DECODE:
        name = f"attend: {case.phase} ({case.q_heads}, {case.kv_heads}), {case.rows} rows, {case.selection}"
        yield name, lambda case=case: attention.prepared_once(case)


def run_once(only: str) -> None:
    """Run each case once to compile it, then once between the marks that `ncu` waits for."""
    import torch

    torch.manual_seed(0)
    for name, prepare in cases():
        if only not in name:
            continue
        run = prepare()
        run()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda.nvtx.range_push(name)
        run()
        torch.cuda.nvtx.range_pop()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        del run
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--csv", type=Path, help="keep ncu's own table in this file")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.once:
        run_once(chosen.only)
        return 0
    if shutil.which("ncu") is None:
        parser.error("needs `ncu` (Nsight Compute) on the PATH")
    sections = [part for section in SECTIONS for part in ("--section", section)]
    command = [
        "ncu",
        "--profile-from-start",
        "off",
        "--clock-control",
        "none",
        "--nvtx",
        "--csv",
        "--page",
        "raw",
    ]
    command += [
        *sections,
        sys.executable,
        "-m",
        "bench_serving.operators_counters",
        "--once",
        "--only",
        chosen.only,
    ]
    output = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
    if chosen.csv is not None:
        chosen.csv.write_text(output)
    print(HEADER)
    for counters in read(output.splitlines()):
        print(counters.line())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
