"""The files: released names and shapes, the same bytes every time, nothing overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_m3.tiny import TinyConfig, build
from sglang_m3.tiny.__main__ import main

ODD = TinyConfig(
    seed=7,
    layers=3,
    dense_layers=2,
    hidden=96,
    heads=6,
    kv_heads=2,
    head_dim=64,
    dense_intermediate=160,
    expert_intermediate=32,
    experts=5,
    experts_per_token=3,
    vocab=576,
    vision_layers=1,
    vision_hidden=40,
    vision_heads=2,
    shard_mb=1,
)


def load_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    shards = {file: load_file(checkpoint / file) for file in set(index["weight_map"].values())}
    found = {name: file for file, shard in shards.items() for name in shard}
    assert found == index["weight_map"]
    return {name: shards[file][name] for name, file in found.items()}


def released_shapes(c: TinyConfig) -> dict[str, tuple[int, ...]]:
    """The released checkpoint's tensor names with the shapes its config implies."""
    d, dim, v = c.hidden, c.head_dim, c.vision_hidden
    shapes: dict[str, tuple[int, ...]] = {
        "language_model.model.embed_tokens.weight": (c.vocab, d),
        "language_model.model.norm.weight": (d,),
        "language_model.lm_head.weight": (c.vocab, d),
        "vision_tower.vision_model.embeddings.patch_embedding.weight": (v, 3, 2, 14, 14),
        "vision_tower.vision_model.pre_layrnorm.weight": (v,),
        "vision_tower.vision_model.pre_layrnorm.bias": (v,),
    }
    for n in range(c.layers):
        layer = f"language_model.model.layers.{n}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (d,),
            f"{layer}.post_attention_layernorm.weight": (d,),
            f"{layer}.self_attn.q_proj.weight": (c.heads * dim, d),
            f"{layer}.self_attn.k_proj.weight": (c.kv_heads * dim, d),
            f"{layer}.self_attn.v_proj.weight": (c.kv_heads * dim, d),
            f"{layer}.self_attn.o_proj.weight": (d, c.heads * dim),
            f"{layer}.self_attn.q_norm.weight": (dim,),
            f"{layer}.self_attn.k_norm.weight": (dim,),
        }
        if n < c.dense_layers:
            shapes |= mlp_shapes(f"{layer}.mlp", d, c.dense_intermediate)
            continue
        moe = f"{layer}.block_sparse_moe"
        shapes |= {
            f"{layer}.self_attn.index_q_proj.weight": (c.kv_heads * dim, d),
            f"{layer}.self_attn.index_k_proj.weight": (dim, d),
            f"{layer}.self_attn.index_q_norm.weight": (dim,),
            f"{layer}.self_attn.index_k_norm.weight": (dim,),
            f"{moe}.gate.weight": (c.experts, d),
            f"{moe}.e_score_correction_bias": (c.experts,),
            **mlp_shapes(f"{moe}.shared_experts", d, c.expert_intermediate),
        }
        for e in range(c.experts):
            shapes |= {
                f"{moe}.experts.{e}.w1.weight": (c.expert_intermediate, d),
                f"{moe}.experts.{e}.w2.weight": (d, c.expert_intermediate),
                f"{moe}.experts.{e}.w3.weight": (c.expert_intermediate, d),
            }
    for n in range(c.vision_layers):
        layer = f"vision_tower.vision_model.encoder.layers.{n}"
        for norm in ("layer_norm1", "layer_norm2"):
            shapes |= {f"{layer}.{norm}.weight": (v,), f"{layer}.{norm}.bias": (v,)}
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= linear_shapes(f"{layer}.self_attn.{name}", v, v)
        shapes |= linear_shapes(f"{layer}.mlp.fc1", 2 * v, v) | linear_shapes(f"{layer}.mlp.fc2", v, 2 * v)
    shapes |= linear_shapes("multi_modal_projector.linear_1", d, v)
    shapes |= linear_shapes("multi_modal_projector.linear_2", d, d)
    shapes |= linear_shapes("patch_merge_mlp.linear_1", d, 4 * d)
    shapes |= linear_shapes("patch_merge_mlp.linear_2", d, d)
    return shapes


def mlp_shapes(path: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{path}.gate_proj.weight": (inner, hidden),
        f"{path}.up_proj.weight": (inner, hidden),
        f"{path}.down_proj.weight": (hidden, inner),
    }


def linear_shapes(path: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
    return {f"{path}.weight": (out, into), f"{path}.bias": (out,)}


def file_bytes(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}


@pytest.mark.parametrize("config", [TinyConfig(), ODD], ids=["default", "odd"])
def test_tensors_have_the_released_names_and_shapes(tmp_path: Path, config: TinyConfig) -> None:
    tensors = load_tensors(build(tmp_path / "c", config))
    assert {name: tuple(value.shape) for name, value in tensors.items()} == released_shapes(config)


def test_same_config_gives_the_same_bytes_and_a_repeat_changes_nothing(
    checkpoint: Path, tmp_path: Path
) -> None:
    again = build(tmp_path / "again", TinyConfig())
    first = file_bytes(checkpoint)
    assert file_bytes(again) == first
    stamps = {path: path.stat().st_mtime_ns for path in again.iterdir()}
    assert build(again, TinyConfig()) == again
    assert {path: path.stat().st_mtime_ns for path in again.iterdir()} == stamps
    assert [path.name for path in tmp_path.iterdir()] == ["again"], "scratch folders left behind"


def test_every_random_tensor_depends_on_the_seed(checkpoint: Path, tmp_path: Path) -> None:
    one = load_tensors(checkpoint)
    two = load_tensors(build(tmp_path / "c", TinyConfig(seed=1)))
    assert not [name for name in one if torch.equal(one[name], two[name])]


def test_default_is_small_and_stored_in_several_files(checkpoint: Path) -> None:
    files = file_bytes(checkpoint)
    assert sum(map(len, files.values())) < 50e6
    assert len([name for name in files if name.endswith(".safetensors")]) > 1
    limit = TinyConfig().shard_mb * 2**20 + 2**17
    assert all(len(data) < limit for name, data in files.items() if name.endswith(".safetensors"))


def test_float32_storage_holds_the_same_values(checkpoint: Path, tmp_path: Path) -> None:
    narrow = load_tensors(checkpoint)
    wide = load_tensors(build(tmp_path / "c", TinyConfig(dtype="float32")))
    assert {value.dtype for value in wide.values()} == {torch.float32}
    in_float32 = {name for name, value in narrow.items() if value.dtype == torch.float32}
    assert in_float32 == {name for name in narrow if name.endswith((".gate.weight", "correction_bias"))}
    assert not [name for name in narrow if not torch.equal(narrow[name].float(), wide[name])]


def test_no_tensor_is_trivial(checkpoint: Path) -> None:
    """A zero norm weight or routing bias would hide a loader that drops it."""
    trivial = {
        name: value.float().std().item()
        for name, value in load_tensors(checkpoint).items()
        if value.float().std() < 0.01 or not value.isfinite().all()
    }
    assert not trivial


@pytest.mark.parametrize("stranger", ["notes.txt", "config.json"])
def test_a_folder_with_other_content_is_left_alone(checkpoint: Path, tmp_path: Path, stranger: str) -> None:
    dest = tmp_path / "c"
    build(dest, ODD)
    (dest / stranger).write_text("mine")
    before = file_bytes(dest)
    with pytest.raises(FileExistsError, match=stranger):
        build(dest, ODD)
    assert file_bytes(dest) == before


@pytest.mark.parametrize(
    "fields, complaint",
    [
        ({"dense_layers": 5}, "layers > dense_layers"),
        ({"heads": 6}, "multiple of kv_heads"),
        ({"head_dim": 48}, "multiple of 32"),
        ({"experts_per_token": 9}, "experts_per_token <= experts"),
        ({"topk_blocks": 1}, "topk_blocks"),
        ({"vocab": 1000}, "multiple of 64"),
        ({"vision_heads": 8}, "vision_hidden / vision_heads"),
        ({"dtype": "float16"}, "dtype"),
    ],
)
def test_shapes_that_nothing_could_load_are_refused(fields: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        TinyConfig(**fields)


def test_command_line_builds_what_the_options_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dest = tmp_path / "c"
    options = ["--layers", "2", "--head-dim", "128", "--vocab", "512", "--dtype", "float32", "--seed", "3"]
    monkeypatch.setattr("sys.argv", ["tiny", str(dest), *options])
    main()
    assert "tensors" in capsys.readouterr().out
    wanted = TinyConfig(layers=2, head_dim=128, vocab=512, dtype="float32", seed=3)
    assert file_bytes(dest) == file_bytes(build(tmp_path / "api", wanted))
    monkeypatch.setattr("sys.argv", ["tiny", str(dest), "--seed", "4"])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert "not this checkpoint" in said and "remove it if an earlier version wrote it" in said
