"""A weight update that is refused is answered, on every rank alike, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_m3.models import updates
from sglang_m3.models.loading import WeightError
from sglang_m3.quantization.loading import LayerTensors, WeightFormatError


class Updater:
    """SGLang's updater with a model of one MXFP8 layer; `refused` paths and lists raise."""

    def __init__(self, *, old_is_there: bool = True, error: Exception | None = None) -> None:
        self.model_config = SimpleNamespace(model_path="/old")
        self.tensors = LayerTensors("mxfp8")
        layer = torch.nn.Module()
        layer.quant_method = SimpleNamespace(tensors=self.tensors)
        self.model = torch.nn.Sequential(layer)
        self.old_is_there = old_is_there
        self.error = error
        self.loaded: list[str] = []

    def get_model(self) -> torch.nn.Module:
        return self.model

    def update(self, source: str, load_format: str = "auto") -> tuple[bool, str]:
        self.loaded.append(source)
        if source == "refused":
            raise self.error or self.tensors.fail("w.weight", "is torch.int8")
        return (self.old_is_there, "no such file") if source == "/old" else (True, "done")


class Others:
    """What the other ranks found wrong in each of the rounds in which ranks agree."""

    def __init__(self) -> None:
        self.group = SimpleNamespace(world_size=1, cpu_group=None)
        self.rounds: list[list[str | None]] = []

    def say(self, *rounds: list[str | None]) -> None:
        self.rounds = list(rounds)
        self.group.world_size = 1 + len(rounds[0])

    def gather(self, problems: list[Any], mine: str | None, group: Any) -> None:
        problems[:] = [mine, *self.rounds.pop(0)]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Others:
    others = Others()
    monkeypatch.setattr(updates, "get_parallel", lambda: SimpleNamespace(tp_group=others.group, pp_size=1))
    monkeypatch.setattr(torch.distributed, "all_gather_object", others.gather)
    return others


def from_tensor(updater: Updater, source: str) -> tuple[bool, str]:
    return updates.around_update_from_tensor(lambda _, source: updater.update(source), updater, source)


def from_disk(updater: Updater, source: str) -> tuple[bool, str]:
    return updates.around_update_from_disk(
        lambda _, source, load_format: updater.update(source, load_format), updater, source, "auto"
    )


@pytest.mark.parametrize("update", [from_tensor, from_disk])
def test_what_was_wrong_is_not_held_against_the_next_update(update: Any, ranks: Others) -> None:
    updater = Updater()
    done, message = update(updater, "refused")
    assert not done and "w.weight is torch.int8" in message
    updater.tensors.check_complete()
    assert update(updater, "good") == (True, "done")


def test_the_checkpoint_served_before_is_put_back(ranks: Others) -> None:
    updater = Updater()
    done, message = from_disk(updater, "refused")
    assert updater.loaded == ["refused", "/old"]
    assert (done, message.startswith("/old is served as before")) == (False, True)


def test_a_server_without_weights_to_go_back_to_says_so(ranks: Others) -> None:
    done, message = from_disk(Updater(old_is_there=False), "refused")
    assert not done and "start the server anew" in message and "no such file" in message


@pytest.mark.parametrize("update", [from_tensor, from_disk])
def test_what_another_rank_refuses_is_refused_here_as_well(update: Any, ranks: Others) -> None:
    problem = [None, "experts.7.w1.weight has infinite or NaN values"]
    ranks.say(*([problem] if update is from_tensor else [[None, None], problem]))
    updater = Updater()
    done, message = update(updater, "good")
    assert not done and "experts.7.w1" in message
    assert updater.loaded == (["good", "/old"] if update is from_disk else ["good"])


def test_files_that_are_cut_short_are_refused_before_any_is_read(ranks: Others, tmp_path: Path) -> None:
    """SGLang would load them again in order to go back, and end."""
    (tmp_path / "model.safetensors").write_bytes(b"\x08")
    updater = Updater()
    done, message = from_disk(updater, str(tmp_path))
    assert not done and "model.safetensors" in message and message.startswith("/old is served as before")
    ranks.say(["/new/model.safetensors is incomplete"])
    done, message = from_disk(updater, "good")
    assert not done and "incomplete" in message
    assert updater.loaded == []


def test_a_load_format_that_is_none_is_refused(ranks: Others) -> None:
    updater = Updater()
    done, message = updates.around_update_from_disk(updater.update, updater, "good", "strange")
    assert not done and "'strange'" in message and updater.loaded == []


def test_a_path_that_sglang_refuses_is_not_the_one_to_go_back_to(ranks: Others) -> None:
    updater = Updater()

    def without_weights(*_: Any) -> tuple[bool, str]:
        updater.model_config.model_path = "/nowhere"
        return False, "no weights"

    refused = updates.around_update_from_disk(without_weights, updater, "/nowhere", "auto")
    assert refused == (False, "no weights")
    assert not from_disk(updater, "refused")[0] and updater.loaded == ["refused", "/old"]


@pytest.mark.parametrize("update", [from_tensor, from_disk])
def test_a_pipeline_ends_when_one_stage_alone_refuses(update: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage before has taken the weights; names and shapes, which all stages refuse, are answered."""
    stage = SimpleNamespace(tp_group=SimpleNamespace(world_size=1), pp_size=2)
    monkeypatch.setattr(updates, "get_parallel", lambda: stage)
    with pytest.raises(WeightFormatError, match=r"w\.weight is torch\.int8"):
        update(Updater(), "refused")
    done, message = update(Updater(error=WeightError("1 unknown: w")), "refused")
    assert not done and "1 unknown: w" in message


def test_other_errors_are_not_taken_for_refusals(ranks: Others) -> None:
    def broken(*_: Any) -> tuple[bool, str]:
        raise RuntimeError("CUDA")

    with pytest.raises(RuntimeError, match="CUDA"):
        updates.around_update_from_tensor(broken, Updater(), "x")
    assert issubclass(WeightFormatError, ValueError)
