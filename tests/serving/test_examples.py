"""The programs of `examples/` against one server: what they do with any reply, and what they share."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pytest
from sglang.lang.backend import runtime_endpoint

from examples import branches, frontend_tool_loop, review, tool_loop, tools
from examples.sharing import index_pages
from examples.turns import Turn
from tests.parsing.writing import block
from tests.serving import forced
from tests.serving.conftest import Endpoint
from tests.serving.reply_clients import Served, clients

pytestmark = pytest.mark.xdist_group("bfloat16")
server = pytest.mark.server

PAGE_TOKENS = 128
ANSWER_TOKENS = 12


@pytest.fixture(scope="module")
def served(endpoint: Endpoint, tiny: Path) -> Served:
    return clients(endpoint.url, tiny)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "notes.txt").write_text("one\nzwei 🙂\nthree\n")
    (folder / "long.txt").write_text("\n".join(map(str, range(1000))))
    (folder / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "secret.txt").write_text("not for the model")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    return folder


Converse = Callable[..., list[Turn]]


@pytest.fixture(params=("openai", "frontend"))
def converse(
    request: pytest.FixtureRequest, served: Served, root: Path, monkeypatch: pytest.MonkeyPatch
) -> Converse:
    """`converse(replies)`: the turns of a tool loop whose model replies so."""

    def with_openai(replies: list[str], **options: Any) -> list[Turn]:
        client = openai.OpenAI(
            base_url=f"{served.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=forced.client(served.write, replies),
        )
        return list(tool_loop.converse(client, "How long are my notes?", root, **options))

    def with_frontend(replies: list[str], **options: Any) -> list[Turn]:
        forcing = forced.frontend_request(served.write, replies)
        monkeypatch.setattr(runtime_endpoint, "http_request", forcing)
        return frontend_tool_loop.run(served.url, "How long are my notes?", root, **options)

    return with_openai if request.param == "openai" else with_frontend


THOUGHT = "First I have to read the notes, then I count them. " * 8


@server
def test_the_loop_serves_calls_until_the_model_answers_and_stays_in_the_cache(
    served: Served, converse: Converse
) -> None:
    served.flush()
    calls = (("read_file", {"path": "notes.txt"}), ("calculate", {"expression": "3 * (2 + 5)"}))
    replies = [
        f"<mm:think>{THOUGHT}</mm:think>I look.{block(*calls)}",
        f"<mm:think>{THOUGHT}</mm:think>{block(('read_file', {'path': 'long.txt', 'first_line': 3}))}",
        "<mm:think>Now I know.</mm:think>21.",
    ]
    turns = converse(replies)
    assert [turn.finish_reason for turn in turns] == ["tool_calls", "tool_calls", "stop"]
    assert [turn.reasoning for turn in turns] == [THOUGHT, THOUGHT, "Now I know."]
    assert [turn.content for turn in turns] == ["I look.", "", "21."]
    assert [call.result for call in turns[0].calls] == ["1 one\n2 zwei 🙂\n3 three", "21"]
    assert turns[1].calls[0].result.startswith("3 2\n4 3\n")
    assert turns[0].cached_tokens == 0
    for before, turn in itertools.pairwise(turns):
        assert turn.cached_tokens % PAGE_TOKENS == 0
        # The thinking that was given back is in the cache, too, not only the prompt before it.
        assert before.prompt_tokens < turn.cached_tokens < turn.prompt_tokens


@server
def test_the_loop_answers_calls_that_cannot_be_served(converse: Converse) -> None:
    calls = (
        ("read_file", {"path": "../secret.txt"}),
        ("read_file", {"first_line": 2}),
        ("calculate", {"expression": "two"}),
    )
    turns = converse([block(*calls), "</mm:think>I give up."], thinking_mode="disabled")
    assert [call.result.split(":")[0] for call in turns[0].calls] == ["error"] * 3
    assert turns[-1].content == "I give up."


@server
def test_the_loop_runs_no_call_that_was_cut_off(served: Served, converse: Converse) -> None:
    reply = block(("read_file", {"path": "notes.txt"}), ("read_file", {"path": "long.txt"}))
    count = len(served.write.tokenizer(reply)["input_ids"])
    (turn,) = converse([reply], thinking_mode="disabled", reply_tokens=count - 20)
    assert (turn.finish_reason, turn.calls) == ("length", ())


@server
def test_the_loop_ends_at_its_limit(converse: Converse) -> None:
    reply = block(("calculate", {"expression": "1"}))
    assert len(converse([reply] * 3, turn_limit=2)) == 2


@server
@pytest.mark.parametrize("thinking_mode", ("adaptive", "enabled", "disabled"))
def test_the_loop_copes_with_noise(converse: Converse, thinking_mode: str) -> None:
    (turn,) = converse([], thinking_mode=thinking_mode, reply_tokens=20)
    assert turn.finish_reason == "length"
    assert turn.reasoning + turn.content


@server
def test_reviewers_share_the_diff_and_the_summary_goes_on_from_it(served: Served) -> None:
    served.flush()
    before = index_pages(served.url)
    found = review.run(served.url, review.sample_diff(), answer_tokens=ANSWER_TOKENS)
    assert len(found.findings) == len(review.CONCERNS)
    diff_tokens = len(served.write.tokenizer(review.sample_diff())["input_ids"])
    for answer in (*found.findings, found.summary):
        assert answer.cached_tokens % PAGE_TOKENS == 0
        assert diff_tokens - PAGE_TOKENS < answer.cached_tokens < answer.prompt_tokens, answer
    assert index_pages(served.url).since(before).saved > 0, "no two reviewers were answered together"


@server
def test_branches_share_the_source_that_is_in_the_cache(served: Served) -> None:
    source = branches.SOURCE[:4000]
    branches.run(served.url, branches=2, answer_tokens=1, source=source)
    answers = branches.run(served.url, branches=3, answer_tokens=ANSWER_TOKENS, source=source)
    assert len(answers) == 3
    for answer in answers:
        assert answer.cached_tokens % PAGE_TOKENS == 0
        assert 0 < answer.prompt_tokens - answer.cached_tokens < 2 * PAGE_TOKENS, answer


@server
@pytest.mark.parametrize(
    ("program", "options"),
    (
        (
            branches,
            ("--branches", "2", "--answer-tokens", "8", "--folder", "examples", "--characters", "4000"),
        ),
        (review, ("--answer-tokens", "8")),
        (tool_loop, ("--reply-tokens", "8")),
        (frontend_tool_loop, ("--reply-tokens", "8")),
    ),
    ids=("branches", "review", "tool_loop", "frontend_tool_loop"),
)
def test_a_program_says_what_came_from_the_cache_and_what_sharing_saved(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: ModuleType,
    options: tuple[str, ...],
) -> None:
    monkeypatch.setattr(sys, "argv", [program.__name__, "--url", served.url, *options])
    program.main()
    printed = capsys.readouterr().out
    assert "prompt tokens came from the cache" in printed
    assert "saved by sharing" in printed


def test_a_folder_is_read_as_far_as_the_characters_go(root: Path) -> None:
    (root / "b.py").write_text("two")
    (root / "a.py").write_text("one")
    whole = "\n# a.py\none\n# b.py\ntwo"
    assert branches.read_folder(root, 100) == whole
    assert branches.read_folder(root, 9) == whole[:9]


@pytest.mark.parametrize(
    ("path", "first_line", "expected"),
    (
        ("notes.txt", 2, "2 zwei 🙂\n3 three"),
        ("./notes.txt", 3, "3 three"),
        ("notes.txt", 9, ""),
        ("absent.txt", 1, "error: absent.txt cannot be read"),
        ("binary", 1, "error: binary cannot be read"),
        (".", 1, "error: . cannot be read"),
        ("../secret.txt", 1, "error: ../secret.txt is outside"),
        ("link.txt", 1, "error: link.txt is outside"),
        ("/etc/passwd", 1, "error: /etc/passwd is outside"),
        ("notes.txt", 0, "error: path must be"),
        (None, 1, "error: path must be"),
    ),
)
def test_files_are_read_below_the_folder_only(
    root: Path, path: object, first_line: int, expected: str
) -> None:
    arguments = json.dumps({"path": path, "first_line": first_line})
    result = tools.run_tool(root, "read_file", arguments)
    assert result.startswith(expected) if expected.startswith("error") else result == expected


def test_a_long_file_is_read_in_parts(root: Path) -> None:
    lines = tools.run_tool(root, "read_file", '{"path": "long.txt"}').splitlines()
    assert (len(lines), lines[-1]) == (tools.READ_LINES, f"{tools.READ_LINES} {tools.READ_LINES - 1}")


@pytest.mark.parametrize(
    ("expression", "expected"),
    (
        ("1 + 2 * 3", "7"),
        (" -(2 ** 10) // 3 ", "-342"),
        ("7 % 4 / 2", "1.5"),
        *((bad, "error: ") for bad in ("1 / 0", "2 ** 9999", "9 ** 9 ** 9", "(-1) ** 0.5", "1e308 * 10")),
        *((bad, "error: ") for bad in ("x", "abs(1)", "'a' * 3", "True + 1", "1 +", "", 3, None)),
    ),
)
def test_only_arithmetic_is_calculated(root: Path, expression: object, expected: str) -> None:
    result = tools.run_tool(root, "calculate", json.dumps({"expression": expression}))
    assert result.startswith(expected) if expected.startswith("error") else result == expected


@pytest.mark.parametrize(
    ("name", "arguments"), (("rm", "{}"), ("calculate", '{"expression": "1'), ("calculate", "[]"))
)
def test_an_unusable_call_gets_an_error_for_the_model(root: Path, name: str, arguments: str) -> None:
    assert tools.run_tool(root, name, arguments).startswith("error: ")
