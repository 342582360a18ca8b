"""What cannot be converted is refused before anything is written, by name."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sglang_m3.quantize import convert, quantize_checkpoint
from tests.quantize.checkpoints import LAYER, Q_PROJ, mini

WEIGHT = torch.ones(4, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "name, tensor, complaint",
    [
        (Q_PROJ, torch.ones(4, 40), "K = 40 is not a multiple of 32"),
        (Q_PROJ, torch.ones(4, 64, dtype=torch.int32), "only BF16, F16 and F32"),
        (Q_PROJ, torch.ones(2, 4, 64), "only matrices"),
        (Q_PROJ, WEIGHT.to(torch.float8_e4m3fn), "already quantised"),
        (f"{Q_PROJ}_scale_inv", torch.ones(4, 2, dtype=torch.uint8), "already quantised"),
        (Q_PROJ, torch.full((4, 64), float("nan")), "infinite or NaN"),
        (Q_PROJ, torch.full((4, 64), float("inf")), "infinite or NaN"),
        (f"{LAYER}.block_sparse_moe.experts.gate_up_proj", torch.ones(2, 4, 64), "no rule"),
    ],
)
def test_bad_tensors_are_named(tmp_path: Path, name: str, tensor: torch.Tensor, complaint: str) -> None:
    source = mini(tmp_path / "s", {f"{LAYER}.self_attn.o_proj.weight": WEIGHT, name: tensor})
    with pytest.raises(ValueError, match=complaint) as caught:
        quantize_checkpoint(source, tmp_path / "d")
    assert name in str(caught.value)
    assert not list((tmp_path / "d").glob("*"))


@pytest.mark.parametrize(
    "tensors, config, complaint",
    [
        ({Q_PROJ: WEIGHT}, {"architectures": ["MiniMaxM2ForCausalLM"]}, "not MiniMax-M3"),
        ({Q_PROJ: WEIGHT}, {"quantization_config": {"quant_method": "fp8"}}, "already quantised.*'fp8'"),
        ({Q_PROJ: WEIGHT}, {"text_config": {"quantization_config": {}}}, "already quantised"),
        ({"model.norm.weight": torch.ones(64)}, {}, "no tensor"),
    ],
)
def test_other_checkpoints_are_refused(tmp_path: Path, tensors: dict, config: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        quantize_checkpoint(mini(tmp_path / "s", tensors, **config), tmp_path / "d")
    assert not (tmp_path / "d").exists()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def point(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


@pytest.mark.parametrize(
    "damage, error", [(truncate, ValueError), (point, ValueError), (Path.unlink, FileNotFoundError)]
)
def test_an_incomplete_download_is_refused(
    plain: Path, tmp_path: Path, damage: Callable[[Path], object], error: type[Exception]
) -> None:
    source = tmp_path / "s"
    shutil.copytree(plain, source)
    path = max(source.glob("*.safetensors"))
    damage(path)
    with pytest.raises(error, match=path.name):
        quantize_checkpoint(source, tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_an_index_that_disagrees_with_the_files_is_refused(plain: Path, tmp_path: Path) -> None:
    source = tmp_path / "s"
    shutil.copytree(plain, source)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["language_model.extra"] = min(index["weight_map"].values())
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"language_model\.extra"):
        quantize_checkpoint(source, tmp_path / "d")


def test_a_full_disk_is_noticed_before_writing(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: usage(1000))
    with pytest.raises(OSError, match="GiB are free"):
        quantize_checkpoint(plain, tmp_path / "c")
    assert not list((tmp_path / "c").iterdir())
