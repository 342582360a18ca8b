"""A weight update that is refused is answered, on every rank alike, and leaves nothing behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_m3.models import updates
from sglang_m3.quantization.loading import LayerTensors, WeightFormatError


class Updater:
    """SGLang's updater with a model of one MXFP8 layer; `refused` paths and lists raise."""

    def __init__(self, *, old_is_there: bool = True) -> None:
        self.model_config = SimpleNamespace(model_path="/old")
        self.tensors = LayerTensors("mxfp8")
        layer = torch.nn.Module()
        layer.quant_method = SimpleNamespace(tensors=self.tensors)
        self.model = torch.nn.Sequential(layer)
        self.old_is_there = old_is_there
        self.loaded: list[str] = []

    def get_model(self) -> torch.nn.Module:
        return self.model

    def update(self, source: str, load_format: str = "auto") -> tuple[bool, str]:
        self.loaded.append(source)
        if source == "refused":
            raise self.tensors.fail("w.weight", "is torch.int8")
        return (self.old_is_there, "no such file") if source == "/old" else (True, "done")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What the other ranks found wrong."""
    others: list[str | None] = []
    world = SimpleNamespace(world_size=1, cpu_group=None)
    monkeypatch.setattr(updates, "get_parallel", lambda: SimpleNamespace(tp_group=world))

    def gather(problems: list[Any], mine: str | None, group: Any) -> None:
        problems[:] = [mine, *others]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)

    class Others(list):
        def append(self, problem: str | None) -> None:
            others.append(problem)
            world.world_size = 1 + len(others)

    return Others()


def from_tensor(updater: Updater, source: str) -> tuple[bool, str]:
    return updates.around_update_from_tensor(lambda _, source: updater.update(source), updater, source)


def from_disk(updater: Updater, source: str) -> tuple[bool, str]:
    return updates.around_update_from_disk(
        lambda _, source, load_format: updater.update(source, load_format), updater, source, "auto"
    )


@pytest.mark.parametrize("update", [from_tensor, from_disk])
def test_what_was_wrong_is_not_held_against_the_next_update(update: Any, ranks: list[str | None]) -> None:
    updater = Updater()
    done, message = update(updater, "refused")
    assert not done and "w.weight is torch.int8" in message
    updater.tensors.check_complete()
    assert update(updater, "good") == (True, "done")


def test_the_checkpoint_served_before_is_put_back(ranks: list[str | None]) -> None:
    updater = Updater()
    done, message = from_disk(updater, "refused")
    assert updater.loaded == ["refused", "/old"]
    assert (done, message.startswith("/old is served as before")) == (False, True)


def test_a_server_without_weights_to_go_back_to_says_so(ranks: list[str | None]) -> None:
    done, message = from_disk(Updater(old_is_there=False), "refused")
    assert not done and "start the server anew" in message and "no such file" in message


@pytest.mark.parametrize("update", [from_tensor, from_disk])
def test_what_another_rank_refuses_is_refused_here_as_well(update: Any, ranks: list[str | None]) -> None:
    ranks.append(None)
    ranks.append("experts.7.w1.weight has infinite or NaN values")
    updater = Updater()
    done, message = update(updater, "good")
    assert not done and "experts.7.w1" in message
    assert updater.loaded == (["good", "/old"] if update is from_disk else ["good"])


def test_other_errors_are_not_taken_for_refusals(ranks: list[str | None]) -> None:
    def broken(*_: Any) -> tuple[bool, str]:
        raise RuntimeError("CUDA")

    with pytest.raises(RuntimeError, match="CUDA"):
        updates.around_update_from_tensor(broken, Updater(), "x")
    assert issubclass(WeightFormatError, ValueError)
