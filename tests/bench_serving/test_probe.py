"""What the work was: counted from what a server recorded, and only of variants that can say."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from bench_serving import compare, probe, report
from bench_serving.compare import Comparison
from bench_serving.corpus import RandomCorpus
from bench_serving.probe import Spread, Use
from bench_serving.server import Variant
from bench_serving.store import Store
from bench_serving.workload import PrefixLevel, Traffic, Workload
from sglang_m3.experts import recorder as experts
from tests.bench_serving.conftest import Machine

LOAD = Workload(
    "small",
    "Small.",
    (1, 2),
    (Traffic(input_tokens=(4, 9), output_tokens=(2, 5)),),
    (PrefixLevel(300),),
    requests_per_slot=1,
    least_sessions=2,
)
STOCK = Variant("stock", (("SGLANG_PLUGINS", "none"),), ("--model-path", "m"))
OURS = Variant("ours", (("A", "1"),), ("--model-path", "m"))
USE = Use(44, 9, Spread(3, 5, 8), 128, Spread(100, 110.0, 128), Spread(4, 4.5, 6.25))


def write_blocks(folder: Path, number: int, position: list[int], chosen: dict[int, list]) -> None:
    content = {
        "request_ids": ["a"],
        "request": torch.tensor([0] * (len(position) - 1) + [-1], dtype=torch.int32),
        "position": torch.tensor(position, dtype=torch.int32),
        "chosen": {layer: torch.tensor(ids, dtype=torch.int32) for layer, ids in chosen.items()},
    }
    torch.save(content, folder / f"{os.getpid()}-{number:08d}.pt")


def test_blocks_are_counted_once_without_a_tokens_own_and_without_padding(tmp_path: Path) -> None:
    # Two tokens in blocks 3 and 4, and a padded one, which chose block 9; one index head, up to three blocks.
    padded = [9, 9, 9]
    write_blocks(
        tmp_path,
        0,
        [400, 600, 0],
        {3: [[[0, 3, -1], [0, 3, 4], padded]], 4: [[[2, 3, -1], [2, 4, -1], padded]]},
    )
    write_blocks(tmp_path, 1, [700, 0], {3: [[[1, 4, 5], padded]], 4: [[[2, 5, -1], padded]]})
    recorder = experts.ExpertRecorder(tmp_path)
    for layer in (4, 3):
        recorder.expect(layer)
    for ids in ([[0, 5], [1, 5]], [[7, 1]]):
        for layer, shift in ((3, 0), (4, -5)):
            recorder.record(layer, torch.tensor(ids) % (8 + shift), experts=8)
    found = probe.summary(tmp_path)
    assert (found.tokens, found.visible_blocks, found.experts) == (3, 6, 8)
    # Layer 3: blocks 0 and 3, which is another token's, then 1 and 4; layer 4: 2 alone.
    assert found.distinct_blocks == Spread(1, 2.5, 4)
    # Layer 3: experts 0, 5, 1, then 7, 1; layer 4: 0, 2, 1, then 1.
    assert found.experts_touched == Spread(3, 3.5, 4)
    assert found.experts_each_step == Spread(2, 2.25, 2.5)


def compared(store: Store, **changed: object) -> dict[str, str]:
    """What broke."""
    options = {"variants": (STOCK, OURS), "workloads": (LOAD,), "repeats": 1, "rounds": 1, "seed": 0}
    comparison = Comparison(**options | changed)
    begin = time.monotonic()
    assert compare.run(comparison, RandomCorpus(500), store).broken == {}
    return compare.note_work(comparison, RandomCorpus(500), store, begin)


@pytest.fixture
def recorded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that probes were recorded in; each existed when its server started."""
    folders: list[Path] = []

    def use(url: str, load: object, folder: Path) -> Use:
        assert folder.is_dir()
        folders.append(folder)
        return USE

    monkeypatch.setattr(probe, "use", use)
    return folders


def test_the_plugins_variants_are_probed_once_after_everything(
    machine: Machine, recorded: list[Path], tmp_path: Path
) -> None:
    store = Store(tmp_path)
    assert compared(store) == {}
    assert machine.order == ["+stock", "-stock", "+ours", "-ours", "+ours", "-ours"]
    assert machine.logs == ["stock.log", "ours.log", "ours-probe.log"]
    assert len(recorded) == 1 and not recorded[0].exists()
    (line,) = store.probes()
    assert (line["variant"], line["workload"], line["distinct_blocks"]["most"]) == ("ours", "small", 8)
    machine.order.clear()
    assert compared(store) == {}
    assert machine.order == []


def test_no_probe_begins_when_the_time_is_over(
    machine: Machine, recorded: list[Path], tmp_path: Path
) -> None:
    store = Store(tmp_path)
    assert compared(store) == {}
    (tmp_path / "probes.jsonl").unlink()
    assert compared(store, stop_after_seconds=0.0) == {}
    assert store.probes() == [] and len(recorded) == 1


def test_a_report_says_what_the_work_was_and_who_cannot_say(
    machine: Machine, recorded: list[Path], tmp_path: Path
) -> None:
    store = Store(tmp_path)
    compared(store)
    text = report.write(store, title="t", command="c").read_text()
    assert "| stock | small | 300 |" + " - |" * 6 in text, text
    ours = "| ours | small | 300 | 44 | 3 / 5 / 8 | 9 | 100 / 110 / 128 | 4.0 / 4.5 / 6.2 | 128 |"
    assert ours in text, text


def test_a_probe_that_breaks_is_named_and_leaves_the_points(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def use(*_: object) -> Use:
        raise RuntimeError("no memory")

    monkeypatch.setattr(probe, "use", use)
    store = Store(tmp_path)
    assert compared(store) == {"probe of ours": f"no memory (log: {tmp_path / 'ours-probe.log'})"}
    assert len(store.points()) == 4 and store.probes() == []
    assert "What the work was" not in report.write(store, title="t", command="c").read_text()


@pytest.mark.parametrize(("gpus", "eager"), [((), False), (("a GPU",), True)], ids=["no GPU", "GPU"])
def test_recording_needs_steps_without_graphs(
    gpus: tuple[str, ...], eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "gpus", lambda: gpus)
    made = probe.recording(OURS, tmp_path)
    assert made.environment == (("A", "1"), (probe.RECORD, str(tmp_path)))
    assert ("--disable-cuda-graph" in made.flags) is eager
