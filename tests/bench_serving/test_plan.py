"""The plan's arithmetic reads what a step reads, and agrees with measured steps."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench_serving import plan
from bench_serving.cost_model import GPUS, Layout, Step, step_cost
from sglang_m3.config import M3Config
from sglang_m3.doctor.memory import Parallel, index_bytes_per_token, weight_bytes
from sglang_m3.doctor.published import NAMES, config_of
from tests.bench_serving.points import failed, point

H200 = GPUS["h200"]
RELEASED = M3Config.read(config_of(NAMES[0]))
EIGHT = Layout(RELEASED, Parallel(tp=8, ep=8))


def test_the_emulated_rank_costs_what_the_real_one_does_but_for_its_routing() -> None:
    emulated, step = plan.emulated_rank(), Step(1, 1, 60_000, 500, True)
    ours, real = step_cost(emulated, step), step_cost(EIGHT, step)
    assert {part for part in real.bytes if ours.bytes[part] != pytest.approx(real.bytes[part], rel=0.01)} == {
        # One of 16 experts where a real rank's token meets half an expert, and a router of 16 outputs.
        "experts",
        "router and head",
    }
    assert ours.bytes["experts"] == pytest.approx(2 * real.bytes["experts"])


@pytest.mark.parametrize("requests", [1, 8, 64])
def test_sharing_reads_a_prefix_once(requests: int) -> None:
    shared, unshared = (
        step_cost(EIGHT, Step(requests, 1, 60_000, 500, sharing)).bytes for sharing in (True, False)
    )
    per_token = index_bytes_per_token(RELEASED, EIGHT.parallel)
    assert shared["index keys"] == (60_000 + requests * 500) * per_token
    assert unshared["index keys"] == requests * 60_500 * per_token
    of_all = (60_000 + requests * 500) / (requests * 60_500)
    assert shared["dense layers' cache"] == pytest.approx(unshared["dense layers' cache"] * of_all)
    # A row reads 2,048 tokens at most, and rows together no more than there are.
    of_chosen = min(1, (60_000 + requests * 500) / (requests * 2048))
    assert shared["chosen blocks"] == pytest.approx(unshared["chosen blocks"] * of_chosen)
    parts = {"index keys", "dense layers' cache", "chosen blocks"}
    assert {part for part in shared if shared[part] != unshared[part]} <= (parts if requests > 1 else set())


def test_every_expert_is_read_once_and_never_more() -> None:
    held = weight_bytes(RELEASED, EIGHT.parallel, "bfloat16").experts
    reads = [step_cost(EIGHT, Step(rows, 1, 1000, 10, True)).bytes["experts"] for rows in (1, 8, 100, 9999)]
    assert reads == sorted(reads)
    # One row touches 4 of the node's 128 experts.
    assert reads[0] == pytest.approx(held * 4 / 128)
    assert reads[-1] == pytest.approx(held)


def test_a_part_takes_the_longer_of_its_bytes_and_its_products() -> None:
    cost = step_cost(EIGHT, Step(1, 512, 60_000, 512, True))
    assert cost.bytes.keys() == cost.flops.keys()
    endless = dataclasses.replace(H200, flops=1e30)
    assert cost.seconds(endless, "bfloat16") == pytest.approx(
        sum(cost.bytes.values()) / H200.bytes_per_second
    )
    endless = dataclasses.replace(H200, bytes_per_second=1e30)
    assert cost.seconds(endless, "bfloat16") == pytest.approx(sum(cost.flops.values()) / H200.flops)
    assert cost.seconds(endless, "mxfp8") < cost.seconds(endless, "bfloat16")


def test_mxfp8_reads_about_half_of_what_is_quantised() -> None:
    step = Step(8, 1, 60_000, 500, True)
    bf16, mxfp8 = (
        step_cost(dataclasses.replace(EIGHT, weights=weights), step) for weights in ("bfloat16", "mxfp8")
    )
    for part in bf16.bytes:
        quantised = part in {"attention weights", "experts", "shared expert and dense MLP"}
        wanted = 33 / 64 if quantised else 1
        assert mxfp8.bytes[part] / bf16.bytes[part] == pytest.approx(wanted, rel=1e-3), part
        # The same products, whatever the format.
        assert mxfp8.flops[part] == pytest.approx(bf16.flops[part]), part


def test_no_measured_step_is_faster_than_its_floor() -> None:
    for measured in plan.MEASURED:
        assert measured.floor < measured.seconds, measured


def test_estimates_start_from_a_step_of_one_request_and_are_near_the_others() -> None:
    for software in ("stock", "plugin"):
        decodes = [one for one in plan.MEASURED if one.software == software and one.step.new_tokens == 1]
        first, *others = decodes
        assert first.floor + plan.beyond_floor(software) == pytest.approx(first.seconds)
        assert others
        for one in others:
            assert one.floor + plan.beyond_floor(software) == pytest.approx(one.seconds, rel=0.25), one


RANK = "The model is one rank of 8, emulated."


def test_the_points_of_a_comparison_are_checked_too(tmp_path: Path) -> None:
    points = [
        point(model_note=RANK),
        failed("ours", model_note=RANK, max_concurrency=16),
        point(
            "stock",
            model_note=RANK,
            index_pages_saved=0,
            max_concurrency=1,
            concurrency=0.3,
            environment={"SGLANG_PLUGINS": "none"},
        ),
        point("mxfp8", model_note=RANK, flags=["--model-path", "m", "--quantization", "mxfp8"]),
    ]
    (tmp_path / "points.jsonl").write_text("".join(json.dumps(each) + "\n" for each in points))
    ours, stock, mxfp8 = plan.measured_points(tmp_path)
    assert ours.step == Step(7, 1, 60_000, 600, sharing=True) and ours.seconds == 0.01
    assert (ours.software, ours.weights) == ("plugin", "bfloat16")
    assert stock.step == Step(1, 1, 60_000, 600, sharing=False) and stock.software == "stock"
    assert mxfp8.weights == "mxfp8" and mxfp8.floor < ours.floor


@pytest.mark.parametrize(
    ("lines", "message"),
    [(None, "holds no points.jsonl"), ([], "no measured points"), ([point()], "another model than")],
)
def test_points_that_cannot_be_checked_are_refused(
    lines: list[dict] | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if lines is not None:
        (tmp_path / "points.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    with pytest.raises(SystemExit):
        plan.main(["--check", str(tmp_path)])
    assert message in capsys.readouterr().err


def test_the_command_prints_memory_steps_and_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--gpu", "h200", "--gpus", "8", "--weights", "mxfp8", "--prefix", "60000"]) == 0
    text = capsys.readouterr().out
    for shown in (
        "| **weights** | **55.7** of 150.8 |",
        "tokens of cache",
        "| 64 |",
        "measured / floor",
        "it is off by -20% to +8%",
        "| plugin, mxfp8 | agentic-60k, median time per output token "
        "| decode, 22 at once | 10.40 | 14.8 | 1.4 | 13.5 | -9% |",
    ):
        assert shown in text, text
    assert plan.main(["--gpu", "h100", "--gpus", "8"]) == 0
    assert "leave room for no cache" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "3"], "64 attention heads"),
        (["--private", "0"], "argument --private: '0' is no whole number of at least 1"),
        (["--concurrency", "8,0"], "argument --concurrency: '8,0' is no list of positive numbers"),
        (["--static-fraction", "1.5"], "--static-fraction is a part of the memory"),
        (["--model-path", "/no/model"], "/no/model/config.json"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        plan.main(arguments)
    assert message in capsys.readouterr().err
