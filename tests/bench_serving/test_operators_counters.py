"""Nsight Compute's table becomes ours, and a run without one says what ncu said."""

from __future__ import annotations

import csv
import io

import pytest

from bench_serving.operators_counters import Counters, read

STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
ROW = {
    "ID": "7",
    "thread Domain:Push/Pop_Range:PL_Type": '74  "<default domain>:choose: 1 head, batch 8:none:none" ',
    "Id:Domain:Start/Stop_Range:PL_Type:PL_Value": "",
    "Kernel Name": "_score_kernel(int, long)",
    "gpu__time_duration.sum": "1,250",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "33.5",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "36",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "12",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "17",
    "smsp__issue_active.avg.per_cycle_active": "0.25",
    STALLED.format("barrier"): "1.5",
    STALLED.format("long_scoreboard"): "7.8",
    "smsp__average_warps_issue_stalled_barrier.ratio": "99",
}


def output(rows: list[dict[str, str]]) -> list[str]:
    text = io.StringIO()
    table = csv.DictWriter(text, ROW, quoting=csv.QUOTE_ALL)
    table.writeheader()
    table.writerow(dict.fromkeys(ROW, "") | {"gpu__time_duration.sum": "ns"})
    table.writerows(rows)
    return ["==PROF== Connected", "what the program prints", *text.getvalue().splitlines()]


def test_a_kernels_counters_are_read_with_its_case_and_its_waits_in_order() -> None:
    second = ROW | {"ID": "8", "Kernel Name": "_select_kernel", "gpu__time_duration.sum": "300"}
    got = list(read(output([ROW, second])))
    assert got[0] == Counters(
        case="choose: 1 head, batch 8",
        kernel="_score_kernel",
        microseconds=1.25,
        dram=33.5,
        l2=36,
        sm=12,
        occupancy=17,
        issued=25,
        stalls=(("long_scoreboard", 7.8), ("barrier", 1.5)),
    )
    assert [counters.kernel for counters in got] == ["_score_kernel", "_select_kernel"]
    assert got[0].line() == (
        "| choose: 1 head, batch 8 | `_score_kernel` | 1.2 | 34% | 36% | 12% | 17% | 25% |"
        " long_scoreboard 7.8, barrier 1.5 |"
    )


def test_a_run_without_a_table_repeats_what_ncu_said() -> None:
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        list(read(["==ERROR== ERR_NVGPUCTRPERM - no permission"]))
