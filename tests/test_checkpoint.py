"""Weight files that are missing or cut short are found before a server loads them, and NaN on request."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_m3 import checkpoint, hardware
from sglang_m3.checkpoint import BadTensor, CheckpointError, bad_tensors, check_files, weight_files
from sglang_m3.doctor.__main__ import main
from sglang_m3.tiny import build
from tests.test_overrides import provide

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("whole") / "tiny")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "tiny"))


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def test_a_whole_checkpoint_passes(whole: Path) -> None:
    check_files(whole)
    assert [path.name for path in weight_files(whole)][-1] == SHARD
    assert list(bad_tensors(whole)) == []


@pytest.mark.parametrize("size", [0, 7, 8, 100, -1, -4096], ids=str)
def test_a_cut_file_is_named(folder: Path, size: int) -> None:
    path = folder / SHARD
    cut(path, size if size >= 0 else path.stat().st_size + size)
    with pytest.raises(CheckpointError, match=rf"{SHARD}.*download it again"):
        check_files(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5000000000\n",
        b"\x02\0\0\0\0\0\0\0{]",
        b"\x08\0\0\0\0\0\0\0" + b'{"a": 1}',
        b"\x02\0\0\0\0\0\0\0[]",
    ],
)
def test_what_is_no_safetensors_file_is_named(folder: Path, content: bytes) -> None:
    (folder / SHARD).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{SHARD}.*no safetensors file"):
        check_files(folder)


def test_a_file_that_is_too_long_is_named(folder: Path) -> None:
    with (folder / SHARD).open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match=SHARD):
        check_files(folder)


def test_missing_files_of_the_index_are_named(folder: Path) -> None:
    (folder / SHARD).unlink()
    with pytest.raises(CheckpointError, match=rf"lacks 1 of the 2 .*{SHARD}"):
        check_files(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "{}"])
def test_an_index_that_is_none_is_named(folder: Path, content: str) -> None:
    (folder / checkpoint.INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        check_files(folder)


def test_a_folder_without_weights_is_named(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="has no weight files"):
        check_files(folder)


def spoil(folder: Path, name: str, element: int, value: float) -> None:
    path = folder / json.loads((folder / checkpoint.INDEX).read_text())["weight_map"][name]
    tensors = load_file(path)
    tensors[name].view(-1)[element] = value
    save_file(tensors, path, metadata={"format": "pt"})


def test_nan_and_infinite_weights_are_found_where_they_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also behind the first of the pieces that a large tensor is read in."""
    monkeypatch.setattr(checkpoint, "CHUNK_ELEMENTS", 1000)
    norm = "language_model.model.layers.3.self_attn.index_k_norm.weight"
    projection = "language_model.model.layers.0.self_attn.q_proj.weight"
    spoil(folder, norm, 5, float("nan"))
    spoil(folder, projection, 30_001, float("-inf"))
    spoil(folder, projection, 30_002, float("nan"))
    found = {tensor.name: tensor for tensor in bad_tensors(folder)}
    files = json.loads((folder / checkpoint.INDEX).read_text())["weight_map"]
    assert found == {
        norm: BadTensor(files[norm], norm, 1, 0, 5),
        projection: BadTensor(files[projection], projection, 1, 1, 30_001),
    }
    assert main(["--check-weights", str(folder)]) == 1
    output = capsys.readouterr().out
    assert f"{norm} has 1 NaN and 0 infinite values, the first at element 5" in output


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str
)
def test_nan_is_found_in_every_dtype_of_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.ones(3, 37)
    values[2, 1] = float("nan")
    tensors = {"a": values.to(dtype), "b": torch.ones(3).to(dtype), "count": torch.tensor([255, 0])}
    save_file(tensors, tmp_path / "model.safetensors")
    assert list(bad_tensors(tmp_path)) == [BadTensor("model.safetensors", "a", 1, 0, 75)]


def test_a_scale_of_255_is_nan(tmp_path: Path) -> None:
    scale = torch.full((2, 4), 127, dtype=torch.uint8)
    good = {"q_proj.weight_scale_inv": scale, "other": torch.full((3,), 255, dtype=torch.uint8)}
    save_file(good, tmp_path / "model.safetensors")
    assert list(bad_tensors(tmp_path)) == []
    scale[1, 2] = 255
    save_file({"q_proj.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    assert list(bad_tensors(tmp_path)) == [BadTensor("model.safetensors", "q_proj.weight_scale_inv", 1, 0, 6)]


def test_the_doctor_says_that_all_is_well_or_what_is_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--check-weights", str(folder)]) == 0
    assert "every weight is a number" in capsys.readouterr().out
    cut(folder / SHARD, 1000)
    assert main(["--check-weights", str(folder), "--json"]) == 1
    assert SHARD in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize("target", ["cpu", "sm90"])
@pytest.mark.parametrize("load_format", ["auto", "safetensors"])
def test_a_server_stops_before_it_loads_a_cut_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, target: str, load_format: str
) -> None:
    monkeypatch.setattr(hardware, "target", lambda: target)
    flags = {"model_path": str(folder), "load_format": load_format}
    assert provide(**flags)["page_size"] == 128
    cut(folder / SHARD, 5000)
    with pytest.raises(CheckpointError, match=SHARD):
        provide(**flags)
    assert provide(**flags | {"load_format": "dummy"})["page_size"] == 128
    assert provide(**flags | {"model_path": "MiniMaxAI/MiniMax-M3"})["page_size"] == 128
