"""A tiny checkpoint in the MXFP8 format is the conversion of the plain one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_m3.quantize import quantize_checkpoint
from sglang_m3.quantize.shard import same_bytes
from sglang_m3.tiny import TinyConfig, build
from sglang_m3.tiny.__main__ import main

SMALL = TinyConfig(layers=2, vocab=512, hidden=96, vision_layers=1, experts=3)
MXFP8 = replace(SMALL, quantize="mxfp8")


def file_bytes(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}


def test_command_line_writes_what_the_converter_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted = quantize_checkpoint(build(tmp_path / "plain", SMALL), tmp_path / "converted")
    options = "--layers 2 --vocab 512 --hidden 96 --vision-layers 1 --experts 3 --quantize mxfp8"
    monkeypatch.setattr("sys.argv", ["tiny", str(tmp_path / "direct"), *options.split()])
    main()
    assert file_bytes(tmp_path / "direct") == file_bytes(converted)
    assert build(tmp_path / "direct", MXFP8) == tmp_path / "direct", "a repeat changes nothing"
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "converted", "direct"}, (
        "scratch left behind"
    )


def test_storage_type_does_not_change_quantised_bytes(tmp_path: Path) -> None:
    narrow = build(tmp_path / "narrow", MXFP8)
    wide = build(tmp_path / "wide", replace(MXFP8, dtype="float32"))
    one, two = (
        {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
        for folder in (narrow, wide)
    )
    quantised = [name for name, value in one.items() if value.dtype in (torch.float8_e4m3fn, torch.uint8)]
    assert len(quantised) > 40 and one.keys() == two.keys()
    assert not [name for name in quantised if not same_bytes(one[name], two[name])]


@pytest.mark.parametrize(
    "fields, complaint",
    [
        ({"quantize": "fp4"}, "quantize is mxfp8"),
        ({"quantize": "mxfp8", "expert_intermediate": 80}, "multiples of 32"),
        ({"quantize": "mxfp8", "hidden": 72}, "multiples of 32"),
    ],
)
def test_what_cannot_be_quantised_is_refused(fields: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        TinyConfig(**fields)
