"""What failed while the plugin registered reaches whoever starts an M3 server, and nobody else."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
from sglang.srt.arg_groups import model_override_base
from sglang.srt.arg_groups.overrides import collect_model_override_declarations
from sglang.srt.configs import model_config

import sglang_m3
from sglang_m3 import compat, hardware, refusal, settings
from sglang_m3.architectures import M3_ARCHITECTURES


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_override_base, "_MODEL_OVERRIDE_FNS", {})


def providers(architecture: str) -> list:
    return model_override_base._MODEL_OVERRIDE_FNS.get(architecture, [])


@pytest.mark.parametrize("architecture", M3_ARCHITECTURES)
def test_a_failed_registration_is_raised_for_m3_only(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved() -> None:
        raise compat.MovedSymbolError("sglang.somewhere is gone")

    monkeypatch.setattr(compat, "check", moved)
    sglang_m3.register()
    (provider,) = providers(architecture)
    with pytest.raises(refusal.PluginFailedError, match=r"sglang\.somewhere is gone.*SGLANG_PLUGINS=none"):
        provider(SimpleNamespace(), SimpleNamespace())
    assert providers("LlamaForCausalLM") == []


def test_a_wrong_setting_is_raised_for_m3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_M3_BLOKS", "1")
    sglang_m3.register()
    with pytest.raises(refusal.PluginFailedError, match="SGLANG_M3_BLOKS"):
        providers(M3_ARCHITECTURES[0])[0](SimpleNamespace(), SimpleNamespace())


def test_the_model_configuration_carries_the_reason_where_the_registry_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Config:
        def __init__(self, architecture: str) -> None:
            self.hf_config = SimpleNamespace(architectures=[architecture])

    monkeypatch.delattr(model_override_base, "register_model_override")
    monkeypatch.setattr(model_config, "ModelConfig", Config)
    refusal.refuse_m3("the reason")
    assert model_config.ModelConfig("LlamaForCausalLM").hf_config
    with pytest.raises(refusal.PluginFailedError, match="the reason"):
        model_config.ModelConfig(M3_ARCHITECTURES[0])


def test_the_process_ends_where_sglang_has_neither_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(model_override_base, "register_model_override")
    monkeypatch.delattr(model_config, "ModelConfig")
    with pytest.raises(SystemExit, match="the reason"):
        refusal.refuse_m3("the reason")


def test_sglang_lets_a_providers_exception_propagate() -> None:
    refusal.refuse_m3("the reason")
    with pytest.raises(refusal.PluginFailedError, match="the reason"):
        collect_model_override_declarations(M3_ARCHITECTURES[0], SimpleNamespace(), SimpleNamespace())


def test_unsupported_hardware_registers_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_hooks", registered := defaultdict(list))
    monkeypatch.setattr(hardware, "target", lambda: None)
    sglang_m3.register()
    assert not registered
    (provider,) = providers(M3_ARCHITECTURES[0])
    assert provider(SimpleNamespace(), SimpleNamespace()) == {}


def test_settings_are_strict(tmp_path) -> None:
    assert settings.read({}) == settings.Settings()
    assert settings.read({"SGLANG_M3_RECORD_BLOCKS": str(tmp_path)}).record_blocks == tmp_path
    assert settings.read({"SGLANG_M3_ALLOW_CUSTOM_AR": "1"}) == settings.Settings()
    assert settings.read({"SGLANG_M3_INDEX_DTYPE": "fp8_e4m3"}).index_dtype == "fp8_e4m3"
    with pytest.raises(settings.SettingError, match="SGLANG_M3_INDEX_DTYPE=fp8: pass one of bfloat16"):
        settings.read({"SGLANG_M3_INDEX_DTYPE": "fp8"})
    assert settings.read({"SGLANG_M3_MXFP8": "exact"}).mxfp8 == "exact"
    with pytest.raises(settings.SettingError, match="SGLANG_M3_MXFP8=slow: pass one of auto, exact, fast"):
        settings.read({"SGLANG_M3_MXFP8": "slow"})
    with pytest.raises(settings.SettingError, match=r"SGLANG_M3_RECORD_BLOCKS=.*no such directory"):
        settings.read({"SGLANG_M3_RECORD_BLOCKS": str(tmp_path / "missing")})
    with pytest.raises(settings.SettingError, match="SGLANG_M3_RECORD"):
        settings.read({"SGLANG_M3_RECORD": "1"})
