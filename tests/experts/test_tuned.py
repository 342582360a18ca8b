"""Tuned configurations of SGLang's experts: M3's shapes find theirs, and nothing else changes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config as lookup
from sglang.srt.plugins.hook_registry import HookType

from sglang_m3 import hooks
from sglang_m3.experts import tuned
from sglang_m3.models import minimax_m3

H200 = "NVIDIA H200"
ENTRY = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}
ORIGINAL = "SGLang's answer"


@pytest.fixture(autouse=True)
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "get_device_name", lambda *_: H200)
    monkeypatch.setattr(tuned, "_serving_m3", False)
    monkeypatch.delenv(tuned.DIRECTORY_VARIABLE, raising=False)
    tuned.shipped.cache_clear()


def built(model_class: type) -> None:
    tuned.after_get_model_architecture((model_class, model_class.__name__), None)


def serve_m3() -> None:
    built(minimax_m3.MiniMaxM3SparseForConditionalGeneration)


def looked_up(experts: int, width: int, dtype: str | None = None, down: bool = False) -> Any:
    return tuned.around_get_moe_configs(lambda *_, **__: ORIGINAL, experts, width, dtype, down_moe=down)


@pytest.mark.parametrize("down", [False, True], ids=["first product", "second product"])
@pytest.mark.parametrize("experts", [16, 32], ids=["one of eight", "one of four"])
def test_an_expert_parallel_rank_of_m3_finds_its_file(experts: int, down: bool) -> None:
    serve_m3()
    found = looked_up(experts, 3072, down=down)
    assert found is not ORIGINAL
    assert {1, 64, 8192} <= found.keys()


def test_sglang_takes_the_nearest_step_of_both_products(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_m3()
    monkeypatch.setattr(
        lookup, "get_moe_configs", functools.partial(tuned.around_get_moe_configs, lookup.get_moe_configs)
    )
    first, (second, _) = lookup.try_get_optimal_moe_config(
        (16, 6144, 6144), (16, 6144, 3072), 4, None, 63, return_down_config=True
    )
    assert first == looked_up(16, 3072)[64]
    assert second == looked_up(16, 3072, down=True)[64]


@pytest.mark.parametrize(
    ("experts", "width", "dtype"),
    [(128, 384, None), (16, 3072, "fp8_w8a8"), (16, 4096, None), (17, 3072, None)],
    ids=["SGLang has a file", "quantised", "SGLang has a file of another Triton", "nobody has a file"],
)
def test_other_shapes_are_sglangs(experts: int, width: int, dtype: str | None) -> None:
    serve_m3()
    assert looked_up(experts, width, dtype) is ORIGINAL


def test_another_model_of_the_same_shape_is_sglangs() -> None:
    class Upstream:
        """SGLang's class under M3's name, and a model that is not M3."""

    assert looked_up(16, 3072) is ORIGINAL
    serve_m3()
    Upstream.__name__ = "MiniMaxM3SparseForConditionalGeneration"
    built(Upstream)
    assert looked_up(16, 3072) is ORIGINAL
    serve_m3()
    Upstream.__name__ = "Qwen3MoeForCausalLM"
    built(Upstream)
    assert looked_up(16, 3072) is ORIGINAL


def test_the_plugins_class_is_chosen_before_it_is_asked_for() -> None:
    """Hooks of one target apply in the order in which they are registered."""
    target = "sglang.srt.model_loader.utils.get_model_architecture"
    kinds = [kind for name, _, kind in (*hooks.EVERYWHERE, *hooks.ON_HOPPER) if name == target]
    assert kinds == [HookType.AROUND, HookType.AFTER]


def test_a_directory_of_the_users_own_is_sglangs_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_m3()
    monkeypatch.setenv(tuned.DIRECTORY_VARIABLE, "anywhere")
    assert looked_up(16, 3072) is ORIGINAL


def test_another_gpu_is_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_m3()
    monkeypatch.setattr(lookup, "get_device_name", lambda *_: "NVIDIA H20")
    assert looked_up(16, 3072) is ORIGINAL


@pytest.mark.parametrize(
    ("versions", "running", "expected"),
    [
        (("3.6.0", "3.8.0", "3.10.0"), "3.8.0", "3.8.0"),
        (("3.6.0", "3.10.0", "3.9.1"), "3.8.0", "3.10.0"),
        (("3.6.0",), "3.8.0", "3.6.0"),
    ],
    ids=["this version's", "else the newest", "or the only one"],
)
def test_the_file_of_a_triton_version(
    versions: tuple[str, ...],
    running: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for number, version in enumerate(versions):
        folder = tmp_path / f"triton_{version.replace('.', '_')}"
        folder.mkdir()
        for ending in ("", "_down"):
            file = folder / f"E=16,N=3072,device_name=NVIDIA_H200{ending}.json"
            file.write_text(json.dumps({str(number): ENTRY}))
    monkeypatch.setattr(tuned, "CONFIGS", tmp_path)
    monkeypatch.setattr(lookup.triton, "__version__", running)
    serve_m3()
    with caplog.at_level("INFO"):
        for _ in range(3):
            assert looked_up(16, 3072) == {versions.index(expected): ENTRY}
            assert looked_up(16, 3072, down=True) == {versions.index(expected): ENTRY}
    (line,) = [
        record.message for record in caplog.records if "configuration of its experts" in record.message
    ]
    assert expected.replace(".", "_") in line


@pytest.mark.parametrize("file", sorted(tuned.CONFIGS.rglob("*.json")), ids=lambda file: file.name)
def test_a_shipped_file_fits_the_kernel(file: Path) -> None:
    """Both products share the height of their blocks, and a program's blocks fit Hopper's shared memory."""
    first = json.loads(file.with_name(file.name.replace("_down", "")).read_text())
    for tokens, entry in json.loads(file.read_text()).items():
        assert entry["BLOCK_SIZE_M"] == first[tokens]["BLOCK_SIZE_M"], tokens
        assert 3072 % entry["BLOCK_SIZE_K"] == 6144 % entry["BLOCK_SIZE_N"] == 0, tokens
        buffers = entry.get("num_stages", 3) - (entry["BLOCK_SIZE_M"] < 64)
        bytes_each = 2 * entry["BLOCK_SIZE_K"] * (entry["BLOCK_SIZE_M"] + entry["BLOCK_SIZE_N"])
        assert buffers * bytes_each <= 226 << 10, tokens
