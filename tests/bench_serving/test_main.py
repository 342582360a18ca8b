"""Commands do what they say, end with the right status, and refuse what cannot be done."""

from __future__ import annotations

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


def test_text_prompts_are_the_standard_library_in_the_model_s_tokens(tmp_path: Path) -> None:
    tokenizer.write(tmp_path, 2560, 1000)
    text = "".join(corpus.source_text(30_000))
    made = corpus.text_corpus(str(tmp_path), characters=30_000)
    assert AutoTokenizer.from_pretrained(tmp_path).decode(list(made.ids)) == text
    assert len(text) == 30_000 and "import" in text
