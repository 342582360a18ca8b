"""Commands do what they say, end with the right status, and refuse what cannot be done."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bench_serving import corpus, options, server
from bench_serving.__main__ import main
from bench_serving.store import Store
from sglang_m3.tiny import tokenizer
from tests.bench_serving.commands import FLAGS, arguments
from tests.bench_serving.conftest import Machine
from tests.bench_serving.fake_server import FakeServer

pytestmark = pytest.mark.usefixtures("quick")


def test_the_command_compares_and_reports(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments("compare", tmp_path, "--variant", "one", "--variant", "two A=1"), *FLAGS]) == 0
    assert (tmp_path / "latency-against-throughput.png").exists()
    text = (tmp_path / "README.md").read_text()
    assert "--variant one --variant 'two A=1'" in text
    assert "| one | two | 4 | 0 |  |" in text, text
    # The report can be made again elsewhere, from the points alone.
    (tmp_path / "README.md").unlink()
    assert main(["report", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "README.md").read_text() == text


def test_a_report_of_nothing_is_an_error_and_makes_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--out", str(tmp_path / "typo")]) == 1
    assert "typo holds neither points.jsonl nor breakdown.json" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()


def test_failed_requests_are_in_the_exit_status_and_the_report(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.fault = lambda number: "stream" if number == 3 else None
    assert main([*arguments("compare", tmp_path, "--variant", "one"), *FLAGS]) == 1
    assert "one: 1 requests failed" in capsys.readouterr().err
    assert "1 x `{'message': 'went wrong'}`" in (tmp_path / "README.md").read_text()
    with FakeServer(fault=machine.fault) as fake:
        assert main(arguments("run", tmp_path / "run", "--url", fake.url)) == 1


def test_an_interrupted_comparison_reports_what_it_has(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    command = [*arguments("compare", tmp_path, "--variant", "one", "--variant", "two"), *FLAGS]
    start = machine.started
    monkeypatch.setattr(
        server,
        "started",
        lambda variant, log, limit: (start if variant.name == "one" else interrupted)(variant, log, limit),
    )
    assert main(command) == 130
    assert "the same command, within the hour, measures what is missing" in capsys.readouterr().out
    assert "| 2 | one |" in (tmp_path / "README.md").read_text()


WRONG = {
    "no model": (["--variant", "one"], [], "--model-path"),
    "same name twice": (["--variant", "one", "--variant", "one A=1"], FLAGS, "different names"),
    "no such workload": (["--workload", "nothing"], FLAGS, "agentic-60k"),
    "stock without a GPU": (["--variant", "stock SGLANG_PLUGINS=none"], FLAGS, "cannot serve M3 without"),
    "not a variant": (["--variant=--flag"], FLAGS, "variant"),
    "a port": (["--variant", "one --port=30000"], FLAGS, "variant one: --port is chosen by this tool"),
    "no tokenizer": (
        ["--variant", "one", "--prompts", "text"],
        ["--", "--model-path", "/no/model"],
        "/no/model has no tokenizer",
    ),
}


@pytest.mark.parametrize(("more", "flags", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_command_says_what_is_wrong(
    more: list[str],
    flags: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options, "gpus", lambda: ())
    assert main([*arguments("compare", tmp_path, *more), *flags]) == 1
    assert message in capsys.readouterr().err


MISUSED = {
    "no address": (["--url", "127.0.0.1:30000"], "'127.0.0.1:30000' is no address such as http://"),
    "no concurrency": (["--concurrency", "1,,2"], "'1,,2' is no list of positive numbers such as 1,8,32"),
    "concurrency zero": (["--concurrency", "0"], "'0' is no list of positive numbers"),
    "no requests": (["--requests-per-slot", "0"], "'0' is no whole number of at least 1"),
    "no repeats": (["--repeats", "-1"], "'-1' is no whole number of at least 1"),
    "no length": (["--scale", "0"], "'0' is no number above 0"),
    "not a length": (["--scale", "nan"], "'nan' is no number above 0"),
}


@pytest.mark.parametrize(("more", "message"), MISUSED.values(), ids=MISUSED)
def test_an_argument_that_cannot_be_meant_is_named(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments("run", tmp_path, "--url", "http://127.0.0.1:1", *more))
    assert ended.value.code == 2
    assert f"argument {more[0]}: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "compare", "knee", "profile"])
def test_the_help_says_every_default_but_those_of_switches(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    expected = {"run": ("1.0", "0", "server", "1"), "compare": ("2",), "knee": ("50.0", "median", "256")}
    for default in expected.get(command, ("60000", "512", "8", "5", "900.0")):
        assert f"default: {default} " in shown, shown
    assert not {"default: None", "default: inf", "default: False", "SUPPRESS"} & set(shown.split("; "))


def test_a_server_that_dies_at_its_start_is_shown_with_its_log_s_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho first\necho 'no room for the weights'\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    out = tmp_path / "out"
    assert main([*arguments("compare", out, "--variant", "one"), *FLAGS]) == 1
    said = capsys.readouterr()
    assert f"error: one: the server ended; its log, {out / 'one.log'}, ends with:" in said.err
    assert "first\nno room for the weights" in said.err
    assert "not measured: one: agentic-60k at 1, one: agentic-60k at 2" in said.out
    sizes = ["--prefix-tokens", "9", "--new-tokens", "9", "--prompts", "random", "--vocab", "9"]
    assert main(["profile", *sizes, "--variant", "one", "--out", str(out), *FLAGS]) == 1
    assert "no room for the weights" in capsys.readouterr().err
    text = (out / "README.md").read_text()
    # The log's lines would be of this machine.
    assert f"**Not profiled**: one: the server ended; its log, {out / 'one.log'}\n" in text, text


def test_what_is_no_sglang_server_is_said_to_be_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = arguments("run", tmp_path, "--url")
    with FakeServer() as fake:
        assert main([*command, f"{fake.url}/elsewhere"]) == 1
        assert f"{fake.url}/elsewhere: /server_info is not answered as SGLang does" in capsys.readouterr().err
        monkeypatch.setattr(server, "_get_json", lambda url: [])
        assert main([*command, f"{fake.url}/"]) == 1
        assert f"{fake.url}: /server_info names no model_path" in capsys.readouterr().err


def test_a_running_server_is_loaded_from_an_empty_cache(tmp_path: Path) -> None:
    with FakeServer() as fake:
        assert main(arguments("run", tmp_path, "--url", fake.url, "--repeats", "2")) == 0
    assert fake.flushed == 1
    assert len(Store(tmp_path).points()) == 4


def test_the_knee_of_a_running_server_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(token_seconds=0.01) as fake:
        more = ["--url", fake.url, "--most", "3", "--tokens-per-s", "20", "--first-token-s", "5"]
        assert main([*arguments("knee", tmp_path / "knee.jsonl"), *more]) == 0
        assert "knee: 3 in flight (the highest tried, --most 3)" in capsys.readouterr().out
        more[5] = "1000"
        assert main([*arguments("knee", tmp_path / "knee.jsonl"), *more]) == 1
        assert "no concurrency meets" in capsys.readouterr().out
    assert len((tmp_path / "knee.jsonl").read_text().splitlines()) == 4


def test_flags_for_servers_are_refused_where_none_is_started(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main([*arguments("run", tmp_path, "--url", "http://x"), *FLAGS])


def test_a_server_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as fake:
        url = fake.url
    assert main(arguments("run", tmp_path, "--url", url)) == 1
    assert f"error: {url}: " in capsys.readouterr().err


def test_a_model_that_does_not_say_its_vocabulary_is_named(tmp_path: Path) -> None:
    for content in (None, "{", "{}"):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(
            ValueError, match=r"config\.json does not say the vocabulary's size.*--vocab does"
        ):
            corpus.vocabulary(str(tmp_path))
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 1000}}')
    assert corpus.vocabulary(str(tmp_path)) == 900


def test_text_prompts_are_the_standard_library_in_the_model_s_tokens(tmp_path: Path) -> None:
    tokenizer.write(tmp_path, 2560, 1000)
    text = "".join(corpus.source_text(30_000))
    made = corpus.text_corpus(str(tmp_path), characters=30_000)
    assert AutoTokenizer.from_pretrained(tmp_path).decode(list(made.ids)) == text
    assert len(text) == 30_000 and "import" in text
