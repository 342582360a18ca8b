"""`python -m sglang_m3.tiny`: a full disk is said in one line, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_m3.tiny.__main__ import main


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Within it no file can grow beyond `size` bytes, which writers are told as they are of a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [1000, 300_000], ids=["a config file", "a weight file"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dest = tmp_path / "tiny"
    monkeypatch.setattr(sys, "argv", ["tiny", str(dest)])
    with pytest.raises(SystemExit) as end, files_of_at_most(size):
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 1
    assert f"cannot write {dest}" in line and "File too large" in line, line
    assert list(tmp_path.iterdir()) == []
