"""The tutorial on runs: its files, its code and its commands, in order, in an empty folder."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from diffract_dask.blas import blas_threads
from diffract_dask.cli import cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tutorials" / "runs.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("plain", "decay"):
        sys.modules.pop(name, None)


def command(line: str) -> str:
    result = CliRunner().invoke(cli, shlex.split(line)[1:], catch_exceptions=False)
    assert result.exit_code == 0, (line, result.stderr)
    return result.stdout


def first_words(text: str) -> list[str]:
    """Return the first word of every line of a table."""
    return [line.split()[0] for line in text.splitlines() if line.strip() and not line.startswith(("-", "…"))]


def test_the_tutorial_runs_as_printed(folder: Path) -> None:
    space: dict[str, object] = {}
    printed = ""
    kinds = []
    for kind, text in BLOCK.findall(PAGE.read_text(encoding="utf8")):
        kinds.append(kind)
        named = re.match(r"# file: (\S+)\n", text)
        if named:
            (folder / named[1]).write_text(text)
        elif kind == "python":
            with blas_threads(1):  # for matrices this small, a second thread costs more than it saves
                exec(compile(text, str(PAGE), "exec"), space)
        elif kind == "sh":
            for line in text.splitlines():
                assert line.startswith("$ diffract-dask ")
                printed += command(line.removeprefix("$ "))
        else:
            assert set(first_words(text)) <= set(first_words(printed)), text
    assert {"python", "sh", "text"} <= set(kinds)
