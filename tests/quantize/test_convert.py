"""The converter: the released format, complete or not at all, nothing overwritten."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from m3_kernels.reference.dequantize_mxfp8 import dequantize_mxfp8
from m3_kernels.reference.quantize_mxfp8 import quantize_mxfp8
from safetensors.torch import load_file, save_file
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.utils import is_layer_skipped

from sglang_m3.quantize import convert, quantize_checkpoint, shard
from sglang_m3.quantize.__main__ import main
from sglang_m3.quantize.names import has_no_rule, is_quantized, quantization_config
from sglang_m3.tiny import TinyConfig
from tests.quantize.checkpoints import LAYER, file_bytes, mini, tensors_of
from tests.tiny.test_checkpoint import released_shapes


def test_listed_tensors_are_quantised_and_all_others_kept_byte_for_byte(plain: Path, converted: Path) -> None:
    before, after = tensors_of(plain), tensors_of(converted)
    in_text_layers = [name for name, t in before.items() if ".model.layers." in name and t.ndim == 2]
    expected = {name for name in in_text_layers if not name.endswith("block_sparse_moe.gate.weight")}
    assert {f"{LAYER}.self_attn.index_{x}_proj.weight" for x in "qk"} <= expected
    assert after.keys() == before.keys() | {f"{name}_scale_inv" for name in expected}
    for name, value in before.items():
        if name in expected:
            weight, scale = quantize_mxfp8(value)
            assert shard.same_bytes(after[name], weight), name
            assert shard.same_bytes(after[f"{name}_scale_inv"], scale), name
        else:
            assert shard.same_bytes(after[name], value), name


def test_files_and_index_describe_the_conversion(plain: Path, converted: Path) -> None:
    after = tensors_of(converted)
    index = json.loads((converted / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in after.values())
    for path in converted.glob("*.safetensors"):
        assert load_file(path).keys() == {n for n, file in index["weight_map"].items() if file == path.name}
    config = json.loads((converted / "config.json").read_text())
    assert config.pop("quantization_config") == {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [1, 32],
        "ignored_layers": [
            "lm_head",
            "model.embed_tokens",
            "vision_tower",
            "multi_modal_projector",
            "patch_merge_mlp",
            "language_model.model.layers.1.block_sparse_moe.gate",
            "language_model.model.layers.2.block_sparse_moe.gate",
        ],
    }
    assert config == json.loads((plain / "config.json").read_text())
    changed = {name for name, data in file_bytes(plain).items() if data != (converted / name).read_bytes()}
    weights = {path.name for path in plain.glob("*.safetensors")}
    assert changed <= weights | {"config.json", "model.safetensors.index.json"}
    assert file_bytes(converted).keys() == file_bytes(plain).keys()


def test_the_released_checkpoint_has_as_many_scales() -> None:
    """23,416 tensors in the BF16 release, 45,838 in the MXFP8 release."""
    shapes = released_shapes(TinyConfig(layers=60, dense_layers=3, experts=128, vision_layers=32))
    assert len(shapes) == 23_416
    assert sum(map(is_quantized, shapes)) == 45_838 - 23_416
    assert not [name for name, shape in shapes.items() if has_no_rule(name, shape)]


def test_the_released_list_of_routers_is_in_the_order_of_strings() -> None:
    names = [f"language_model.model.layers.{n}.block_sparse_moe.gate.weight" for n in range(3, 60)]
    layers = [entry.split(".")[3] for entry in quantization_config(names)["ignored_layers"][5:]]
    tens = [layer for ten in range(3, 6) for layer in (ten, *range(10 * ten, 10 * ten + 10))]
    assert layers == [*map(str, [*range(10, 30), *tens, 6, 7, 8, 9])]


def test_sglang_reads_the_config_as_we_mean_it(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())["quantization_config"]
    read = Fp8Config.from_config(config)
    assert read.use_mxfp8 and read.weight_block_size == [1, 32] and read.is_checkpoint_fp8_serialized
    layer = "language_model.model.layers.1"
    skipped = {
        name: is_layer_skipped(name, read.ignored_layers)
        for name in (
            "vision_tower.vision_model.encoder.layers.0.mlp.fc1",
            f"{layer}.block_sparse_moe.gate",
            f"{layer}.self_attn.index_q_proj",
            f"{layer}.block_sparse_moe.experts",
        )
    }
    assert list(skipped.values()) == [True, True, False, False], skipped


def test_an_interrupted_conversion_is_completed_without_rewriting(
    plain: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest, verified = tmp_path / "c", []

    def verify_once(source: Path, written: Path) -> shard.ShardError:
        if verified:
            raise KeyboardInterrupt
        verified.append(written)
        return shard.verify_shard(source, written)

    with monkeypatch.context() as patch:
        patch.setattr(convert, "verify_shard", verify_once)
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(plain, dest)
    finished = [path for path in dest.glob("*.safetensors") if not path.name.startswith(".")]
    assert len(finished) == 1 and not (dest / "config.json").exists()
    stamp = finished[0].stat().st_mtime_ns
    lines: list[str] = []
    quantize_checkpoint(plain, dest, report=lines.append)
    assert file_bytes(dest) == file_bytes(converted)
    assert finished[0].stat().st_mtime_ns == stamp and "already there" in lines[0]


def stray_file(dest: Path) -> str:
    (dest / "other.safetensors").write_bytes(b"mine")
    return "other.safetensors"


def other_config(dest: Path) -> str:
    (dest / "config.json").write_text("{}")
    return "config.json"


def other_tokenizer(dest: Path) -> str:
    (dest / "tokenizer.json").write_text("{}")
    return "tokenizer.json"


def flipped_bit(dest: Path) -> str:
    path = max(dest.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path.name


@pytest.mark.parametrize("spoil", [stray_file, other_config, other_tokenizer, flipped_bit])
def test_what_is_not_this_conversion_is_refused_and_left_alone(
    plain: Path, converted: Path, tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    dest = tmp_path / "c"
    shutil.copytree(converted, dest)
    name = spoil(dest)
    before = file_bytes(dest)
    with pytest.raises(FileExistsError, match=name):
        quantize_checkpoint(plain, dest)
    assert file_bytes(dest) == before


def coarser(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds to a format that keeps 2 mantissa bits."""
    return quantize_mxfp8(x.to(torch.float8_e5m2).float())


def wrong_scale(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight, scale = quantize_mxfp8(x)
    return weight, scale + (torch.arange(scale.shape[1]) == scale.shape[1] - 1)


def too_large_scale(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Small values get lost among the subnormal numbers, which the scale that was written would excuse."""
    _, scale = quantize_mxfp8(x)
    scale = scale + 2
    return (x.float() / torch.exp2(scale.float() - 127).repeat_interleave(32, 1)).to(
        torch.float8_e4m3fn
    ), scale


@pytest.mark.parametrize("wrong", [coarser, wrong_scale, too_large_scale])
def test_a_weight_written_wrongly_gets_no_name(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[torch.Tensor], tuple]
) -> None:
    monkeypatch.setattr(shard, "quantize_mxfp8", wrong)
    with pytest.raises(ValueError, match=r"proj\.weight is further from its source"):
        quantize_checkpoint(plain, tmp_path / "c")
    assert not [path for path in (tmp_path / "c").iterdir() if not path.name.startswith(".")]


def test_other_tensors_written_wrongly_or_not_at_all_are_found(
    plain: Path, converted: Path, tmp_path: Path
) -> None:
    name = min(path.name for path in plain.glob("*.safetensors"))
    tensors = load_file(converted / name)
    norm = "language_model.model.layers.0.input_layernorm.weight"
    save_file({**tensors, norm: tensors[norm] * 2}, tmp_path / "wrong.safetensors")
    with pytest.raises(ValueError, match=f"{norm} was not written as it was"):
        shard.verify_shard(plain / name, tmp_path / "wrong.safetensors")
    del tensors[norm]
    save_file(tensors, tmp_path / "few.safetensors")
    with pytest.raises(ValueError, match=norm):
        shard.verify_shard(plain / name, tmp_path / "few.safetensors")


def test_the_reported_error_is_that_of_the_numbers(plain: Path, converted: Path) -> None:
    name = min(path.name for path in plain.glob("*.safetensors"))
    before, after = load_file(plain / name), load_file(converted / name)
    scales = [key for key in after if key.endswith("_scale_inv")]
    numbers = {k: dequantize_mxfp8(after[k[:-10]], after[k], torch.float64) for k in scales}
    errors = sum(float((numbers[k] - before[k[:-10]].double()).square().sum()) for k in scales)
    values = sum(float(before[k[:-10]].double().square().sum()) for k in scales)
    got = shard.verify_shard(plain / name, converted / name).relative
    assert got == pytest.approx((errors / values) ** 0.5, rel=1e-5) and 0.02 < got < 0.04


def test_large_weights_are_converted_in_parts(
    plain: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard, "VALUES_AT_A_TIME", 7 * 96 + 5)
    assert file_bytes(quantize_checkpoint(plain, tmp_path / "c")) == file_bytes(converted)


def test_a_single_weight_file_needs_no_index(tmp_path: Path) -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    source = mini(tmp_path / "s", {"model.layers.0.self_attn.q_proj.weight": weight, "x": torch.ones(3)})
    dest = quantize_checkpoint(source, tmp_path / "d")
    assert file_bytes(dest).keys() == {"config.json", "model.safetensors"}
    assert tensors_of(dest)["model.layers.0.self_attn.q_proj.weight_scale_inv"].shape == (5, 2)


def test_command_line_shows_progress_and_names_what_is_wrong(
    plain: Path,
    converted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["quantize", str(plain), str(tmp_path / "c")])
    main()
    out = capsys.readouterr().out
    assert all(path.name in out for path in plain.glob("*.safetensors")) and "relative error 0.0" in out
    assert file_bytes(tmp_path / "c") == file_bytes(converted)
    monkeypatch.setattr("sys.argv", ["quantize", str(converted), str(tmp_path / "d")])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2 and "already quantised" in capsys.readouterr().err
