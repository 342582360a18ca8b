"""Whatever M3 is called, `auto` means the project's parsers; other models keep SGLang's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.minimax_m2 import MinimaxM2Detector
from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.srt.parser.template_detection import resolve_auto_parsers
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import hf_transformers_utils
from transformers import AutoTokenizer

from sglang_m3.architectures import M3_ARCHITECTURES
from sglang_m3.parsing import register
from sglang_m3.parsing.reasoning import M3ReasoningDetector
from sglang_m3.parsing.tool_calls import M3ToolCallDetector
from sglang_m3.tiny import TinyConfig, build

NAMES = (
    "MiniMaxAI/MiniMax-M3",
    "MiniMaxAI/MiniMax-M3-MXFP8",
    "MiniMaxAI/MiniMax-M3.1",
    "MiniMaxAI/MiniMax-M3.1-MXFP8",
    "MiniMaxAI/MiniMax-M3.1-Flash",
    "/models/some-folder",
)
M2_TEMPLATE = "{{ messages[0].content }}<minimax:tool_call></minimax:tool_call>"


@pytest.fixture(scope="module")
def m3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("names") / "some-folder", TinyConfig())


@pytest.fixture(scope="module")
def m3_template(m3_folder: Path) -> str:
    return AutoTokenizer.from_pretrained(m3_folder, local_files_only=True).chat_template


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    reasoning, calls = ReasoningParser.DetectorMap, FunctionCallParser.ToolCallParserEnum
    before = dict(reasoning), dict(calls)
    register.register()
    yield
    reasoning.update(before[0])
    calls.update(before[1])


def resolved(
    name: str, template: str | None, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str]:
    """What `auto` becomes for both parsers of a model, as the engine resolves it at its start."""
    tokenizer = SimpleNamespace(chat_template=template, get_vocab=dict)
    config = SimpleNamespace(architectures=[architecture], model_type="", text_config=None)
    monkeypatch.setattr(hf_transformers_utils, "get_tokenizer", lambda *_, **__: tokenizer)
    monkeypatch.setattr(hf_transformers_utils, "get_config", lambda *_, **__: config)
    arguments = ServerArgs(model_path=name, reasoning_parser="auto", tool_call_parser="auto")
    resolve_auto_parsers(arguments)
    view = resolving_view(arguments)
    return view.reasoning_parser, view.tool_call_parser


@pytest.mark.parametrize("architecture", M3_ARCHITECTURES)
@pytest.mark.parametrize("from_template", (True, False), ids=("template", "architecture"))
@pytest.mark.parametrize("name", NAMES)
def test_auto_is_ours_for_every_name(
    name: str, from_template: bool, architecture: str, m3_template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = m3_template if from_template else None
    reasoning, calls = resolved(name, template, architecture, monkeypatch)
    assert (reasoning, calls) == ("minimax-m3", "minimax-m3")
    assert ReasoningParser.DetectorMap[reasoning] is M3ReasoningDetector
    assert FunctionCallParser.ToolCallParserEnum[calls] is M3ToolCallDetector


def test_auto_is_ours_for_a_checkpoint_in_a_folder_of_any_name(m3_folder: Path) -> None:
    arguments = ServerArgs(model_path=str(m3_folder), reasoning_parser="auto", tool_call_parser="auto")
    resolve_auto_parsers(arguments)
    view = resolving_view(arguments)
    assert (view.reasoning_parser, view.tool_call_parser) == ("minimax-m3", "minimax-m3")


@pytest.mark.parametrize("template", (M2_TEMPLATE, None), ids=("template", "architecture"))
def test_auto_is_sglang_s_own_for_m2(template: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    reasoning, calls = resolved("MiniMaxAI/MiniMax-M2", template, "MiniMaxM2ForCausalLM", monkeypatch)
    assert (reasoning, calls) == ("minimax", "minimax-m2")
    assert FunctionCallParser.ToolCallParserEnum[calls] is MinimaxM2Detector


def test_only_one_name_of_each_kind_changes() -> None:
    reasoning, calls = dict(ReasoningParser.DetectorMap), dict(FunctionCallParser.ToolCallParserEnum)
    others = {key: value for key, value in reasoning.items() if value.__module__.startswith("sglang_m3")}
    assert set(others) == {"minimax-m3"}
    others = {key: value for key, value in calls.items() if value.__module__.startswith("sglang_m3")}
    assert set(others) == {"minimax-m3"}
