"""What the engine check on a GPU calls wrong, which itself runs nowhere else."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.serving import gpu_compare, gpu_engine
from tests.serving.gpu_compare import until_parted, what_is_wrong
from tests.serving.gpu_modes import COMPARED, MODES, NEW_TOKENS


def found(mean: float, median: float = 0.0, **tokens: Any) -> dict[str, Any]:
    errors = {"logprob_error_mean": mean, "logprob_error_median": median}
    return errors | ({"tokens_compared": {"mode": "float32", **tokens}} if tokens else {})


@pytest.mark.parametrize(
    ("mode", "errors", "reason"),
    [
        ("graph", found(0.05, 0.02), ""),
        ("graph", found(0.07), "mean error"),
        ("graph", found(0.01, 0.03), "median error"),
        ("graph", found(math.nan), "mean error"),
        ("graph", found(0.01, math.nan), "median error"),
        ("float32", found(2e-6), ""),
        ("float32", found(2e-5), "mean error"),
    ],
)
def test_errors_beyond_what_the_dtype_explains_are_wrong(mode: str, errors: dict, reason: str) -> None:
    assert reason in what_is_wrong(mode, errors) and bool(reason) == bool(what_is_wrong(mode, errors))


@pytest.mark.parametrize("parted_in", ["tokens_until_the_first_difference", "the_same_in_the_first_round"])
def test_another_token_than_plain_decoding_s_is_wrong_in_float32_only(parted_in: str) -> None:
    rounds = ("tokens_until_the_first_difference", "the_same_in_the_first_round")
    same = {name: [NEW_TOKENS, NEW_TOKENS] for name in rounds}
    assert what_is_wrong("ngram-float32", found(2e-6, **same)) == ""
    parted = same | {parted_in: [NEW_TOKENS, 1]}
    assert f"{parted_in} [{NEW_TOKENS}, 1]" in what_is_wrong("ngram-float32", found(2e-6, **parted))
    assert what_is_wrong("ngram", found(0.03, **parted)) == ""


def test_answers_part_at_their_first_different_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_compare, "NEW_TOKENS", 3)
    ours, theirs = {"tokens": [[1, 2, 3], [1, 2, 3]]}, {"tokens": [[1, 2, 3], [1, 9, 3]]}
    assert until_parted(ours, theirs, "tokens") == [3, 1]


@pytest.mark.parametrize("mode", sorted(COMPARED))
def test_a_mode_is_not_compared_without_the_other(
    mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert COMPARED[mode] in MODES
    monkeypatch.setattr("sys.argv", ["gpu_engine", "--modes", mode])
    with pytest.raises(SystemExit) as stopped:
        gpu_engine.main()
    assert stopped.value.code == 2 and COMPARED[mode] in capsys.readouterr().err
