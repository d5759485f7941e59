"""``diffract-dask runs …`` and ``lineage``: every command, as a table, as JSON, and where something is missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from run_project import ROOT, run_project

from diffract_dask import Session
from diffract_dask.cli import cli

RUNS = cli.get_command(click.Context(cli), "runs")
assert isinstance(RUNS, click.Group)
COMMANDS = sorted(RUNS.commands)

# what each command is called with, and what its table shows
CALLS: dict[str, tuple[list[str], list[str]]] = {
    "scan": ([], [r"mysim_v2 +mysim_v2\.py +mysim_v2 \(fork of mysim\)", r"ptycho_v2 \(fork of ptycho\)"]),
    "list": ([], [r"^mysim +3 +sim", r"^  mysim_v2 +3 +sim"]),
    "describe": (["mysim", "jitter"], [r"^base +base", r"^scan\.step +1\.000e-07 +base", r"^amp +2 +own"]),
    "overrides": (["mysim", "jitter"], [r"^amp +changed +1 +2"]),
    "diff": (
        ["mysim_v2"],
        [r"^louder +jitter +differs +amp +2 +3", r"^lost .*forks_of 'jiter'", r"^nan +nan +only_in_p"],
    ),
    "source-diff": (["mysim_v2"], [r'^-dm\.register\("nan"', r"^\+from mysim import _sim"]),
    "compare": (["mysim", "mysim_v2", "-v", "jitter"], [r"^\(variant\) +jitter +louder", r"^amp +\* +2 +3"]),
    "chains": ([], [r"^ptycho +4 +sim, rec +8", r"^  ptycho_v2 +1"]),
    "chain": (["ptycho"], [r"^rec +recon +sim", r"^loud +baseline +- +jitter +plain"]),
    "chain-diff": (
        ["ptycho_v2"],
        [r"^baseline +baseline +differs +sim +base +base +scan\.width", r"^loud .*only_in_parent"],
    ),
    "variation-diff": (["ptycho", "baseline", "loud"], [r"^step rec \(recon\)", r"^amp +\* +1 +2"]),
    "progress": (["ptycho", "baseline"], [r"^sim +done +mysim/base", r"^rec +done"]),
    "scoreboard": (
        ["ptycho", "-b", "baseline"],
        [r"sim\.sim\.mean \[V\] ↑", r"132 \(\+66 worse\) +11 \(\+5\.5 better\)", "nan"],
    ),
    "find": (["amp>1.5"], [r"^variant +mysim/jitter +config", r"^run +mysim/jitter +config"]),
    "why": (["mysim/base", "mysim/jitter"], [r"^differ in: variant, config, outputs", r"^sim +differs +config"]),
    "artifacts": (["mysim/base"], [r"^sim/field\.npy +npy +224 B", r"^sim/notes/info\.txt +text"]),
    "artifact-diff": (["mysim/base", "mysim/jitter", "field.npy"], [r"they differ", r"^ +12 +11 +12 "]),
    "disk": ([], [r"^recon/bad/", r"in all: .*mysim"]),
    "prune": ([], [r"^recon/bad/.*it is failed +would be removed"]),
}
# a call of each that names something that does not exist, and what the error says
MISSING: dict[str, tuple[list[str], str]] = {
    "scan": (["--scan-root", "nowhere"], "nowhere"),
    "list": (["mysmi"], "Did you mean 'mysim'"),
    "describe": (["mysim", "jiter"], "Did you mean 'jitter'"),
    "overrides": (["mysim", "jiter"], "Did you mean 'jitter'"),
    "diff": (["mysmi"], "Did you mean 'mysim'"),
    "source-diff": (["mysmi"], "Did you mean 'mysim'"),
    "compare": (["mysim", "mysmi", "-v", "base"], "Did you mean 'mysim'"),
    "chains": (["--scan-root", "nowhere"], "nowhere"),
    "chain": (["ptyco"], "Did you mean 'ptycho'"),
    "chain-diff": (["ptyco"], "Did you mean 'ptycho'"),
    "variation-diff": (["ptycho", "baseline", "low"], "'low'"),
    "progress": (["ptycho", "bseline"], "Did you mean 'baseline'"),
    "scoreboard": (["ptycho", "-b", "bseline"], "Did you mean 'baseline'"),
    "find": (["nothing like it"], "nothing is found"),
    "why": (["mysim/base", "mysim/gone"], "'mysim/gone'"),
    "artifacts": (["ffffffff"], "'ffffffff'"),
    "artifact-diff": (["mysim/base", "mysim/jitter", "feld.npy"], "sim/field.npy"),
    "disk": (["--root", "nowhere"], "nowhere"),
    "prune": (["--root", "nowhere"], "nowhere"),
}

every_command = pytest.mark.parametrize("command", COMMANDS)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_project(tmp_path_factory.mktemp("project"))


@pytest.fixture
def run(project: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a call of ``diffract-dask runs`` in the project's folder."""
    monkeypatch.chdir(project)

    def call(*args: object, code: int = 0) -> Result:
        before = set(sys.modules)
        result = CliRunner().invoke(cli, ["runs", *map(str, args)], catch_exceptions=False)
        assert result.exit_code == code, (result.stdout, result.stderr)
        assert not (set(sys.modules) - before) & {"mysim", "mysim_v2", "recon", "chains", "broken"}
        return result

    return call


# ------------------------------------------------------------------------------------------- every command


def test_the_tables_of_this_file_have_every_command() -> None:
    assert set(CALLS) == set(MISSING) == set(COMMANDS)


@every_command
def test_the_table_shows_what_was_asked_for(command: str, run: Any) -> None:
    args, expected = CALLS[command]
    shown = run(command, *args).stdout
    for pattern in expected:
        assert re.search(pattern, shown, re.MULTILINE), (pattern, shown)


@every_command
def test_json_is_strict_and_alone_on_standard_output(command: str, run: Any) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    shown = run(command, *CALLS[command][0], "--json").stdout
    assert json.loads(shown, parse_constant=refuse)


@every_command
def test_what_is_not_found_is_one_line_and_exit_code_1(command: str, run: Any) -> None:
    args, message = MISSING[command]
    error = run(command, *args, code=1).stderr.strip()
    assert message in error
    assert len(error.splitlines()) == 1


@every_command
def test_a_mistake_in_the_call_is_exit_code_2(command: str, run: Any) -> None:
    error = run(command, "--no-such-option", code=2).stderr
    assert error.startswith("error: ")
    assert "Traceback" not in error


@every_command
def test_help_has_examples_that_parse(command: str) -> None:
    assert isinstance(RUNS, click.Group)
    shown = CliRunner().invoke(cli, ["runs", command, "--help"]).stdout
    examples = re.findall(rf"^ +diffract-dask runs {command}\b(.*)$", shown, re.MULTILINE)
    assert examples
    known = {name for p in RUNS.commands[command].params for name in p.opts}
    for example in examples:
        assert set(re.findall(r"(?<=\s)--?[a-z][a-z-]*(?=\s|=|$)", example)) <= known
    for parameter in RUNS.commands[command].params:
        assert not isinstance(parameter, click.Option) or parameter.help, parameter.name


# ------------------------------------------------------------------------------------------- more than one answer


def test_a_step_that_failed_is_exit_code_1_with_its_traceback(run: Any) -> None:
    shown = run("progress", "ptycho", "fails", code=1).stdout
    assert re.search(r"^rec +failed +recon/bad", shown, re.MULTILINE)
    assert "ZeroDivisionError: division by zero" in shown


def test_runs_are_listed_and_named_by_path_variant_or_fingerprint(run: Any) -> None:
    listed = json.loads(run("list", "--runs", "--json").stdout)
    assert len(listed) == 8
    assert len(run("list", "--runs", "--status", "failed").stdout.splitlines()) == 3
    record = next(one for one in listed if one["run"].startswith("mysim/jitter/"))
    for name in (record["run"], "mysim/jitter", record["fingerprint"][:10], record["run"] + "/"):
        assert "sim/field.npy" in run("artifacts", name).stdout
    assert run("find", record["fingerprint"][:8]).stdout.count("mysim/jitter") == 1


def test_an_artifact_is_previewed(run: Any) -> None:
    assert "float64 array of shape (3, 4)" in run("artifacts", "mysim/base", "sim/field.npy").stdout
    assert "amp 1.0" in run("artifacts", "mysim/base", "info.txt").stdout
    told = json.loads(run("artifacts", "mysim/nan", "field.npy", "--json").stdout)
    assert told["data"]["heatmap"]["mean"][0] == [{"$float": "nan"}] * 4


def test_texts_are_compared_by_line(run: Any) -> None:
    shown = run("artifact-diff", "mysim/base", "mysim/jitter", "sim/notes/info.txt").stdout
    assert "-amp 1.0\n+amp 2.0" in shown


def test_the_reason_includes_the_sources(run: Any) -> None:
    shown = run("why", "mysim/base", "mysim_v2/base", "--source").stdout
    assert "pipeline" in shown
    assert "+from mysim import _sim" in shown


def test_a_source_that_is_newer_is_noted(project: Path, tmp_path: Path, run: Any) -> None:
    copy = shutil.copytree(project, tmp_path / "copy")
    (copy / "mysim.py").write_text((copy / "mysim.py").read_text().replace("amp=2.0", "amp=2.5"))
    result = run("scoreboard", "ptycho", "--root", copy / "runs", "--scan-root", copy)
    assert "source is newer" in result.stderr


def test_scan_with_import_names_what_is_broken(project: Path, tmp_path: Path, run: Any) -> None:
    copy = shutil.copytree(project, tmp_path / "copy", ignore=shutil.ignore_patterns("runs"))
    where = ("--root", tmp_path / "new", "--scan-root", copy)
    assert "not imported yet" in run("list", *where).stdout
    shown = run("scan", "--import", *where, code=1).stdout
    assert re.search(r"^broken .*boom at import", shown, re.MULTILINE)
    assert re.search(r"^jitter +base", run("list", "mysim", *where).stdout, re.MULTILINE)


def test_prune_removes_only_with_yes(project: Path, tmp_path: Path, run: Any) -> None:
    root = shutil.copytree(project / "runs", tmp_path / "runs", symlinks=True)
    run("prune", "--root", root)
    assert len(list(root.glob("recon/bad/*"))) == 1
    assert "removed" in run("prune", "--root", root, "--yes").stdout
    assert not list(root.glob("recon/bad/*"))
    assert "no run would be removed" in run("prune", "--root", root).stderr


def test_a_root_that_was_moved_answers_as_before(project: Path, tmp_path: Path, run: Any) -> None:
    before = run("artifact-diff", "mysim/base", "mysim/jitter", "field.npy", "--json").stdout
    shutil.copytree(project / "runs", tmp_path / "moved", symlinks=True)
    (tmp_path / "link").symlink_to(tmp_path / "moved", target_is_directory=True)
    for root in (tmp_path / "moved", tmp_path / "link"):
        assert (
            run("artifact-diff", "mysim/base", "mysim/jitter", "field.npy", "--json", "--root", root).stdout == before
        )


def test_it_works_without_pythonpath_and_loads_nothing_heavy(project: Path) -> None:
    code = (
        f"import sys; sys.path[0] = {str(ROOT)!r}; sys.argv = ['diffract-dask', 'runs', 'scoreboard', 'ptycho']\n"
        "from diffract_dask.cli import cli\n"
        "try: cli()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print(*sorted({'dask', 'xarray', 'zarr', 'scipy', 'numpy', 'pandas', 'mysim'} & set(sys.modules)), 'loaded')\n"
    )
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=project, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded"


def test_other_commands_do_not_import_it() -> None:
    code = (
        "import sys; from diffract_dask.cli import cli; cli(['models', '--help'], standalone_mode=False)\n"
        "assert 'diffract_dask.cli_runs' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT)


# ------------------------------------------------------------------------------------------- lineage


def test_lineage(tmp_path: Path) -> None:
    with Session(tmp_path / "store.zarr") as session:
        for step, (name, parent) in enumerate(
            [("a", None), ("b", "a"), ("c", "b"), ("fork", "a"), ("lost", "gone"), ("x", "y"), ("y", "x")]
        ):
            session.models.add({"w": np.eye(3) * (step + 1)}, name, step=step, parent=parent)
    shown = CliRunner().invoke(cli, ["lineage", str(tmp_path / "store.zarr")], catch_exceptions=False)
    assert shown.exit_code == 0
    lines = [line.rstrip() for line in shown.stdout.splitlines()[2:]]
    assert [re.match(r" *\S+", line)[0] for line in lines] == ["a", "  b", "    c", "  fork", "lost", "x", "  y"]  # type: ignore[index]
    assert "'gone' is not in the store" in lines[4]
    assert "its own ancestor" in lines[5]
    told = json.loads(CliRunner().invoke(cli, ["lineage", str(tmp_path / "store.zarr"), "--json"]).stdout)
    assert (told["roots"], told["orphans"], told["cycles"]) == (["a", "lost"], ["lost"], [["x", "y"]])
    missing = CliRunner().invoke(cli, ["lineage", str(tmp_path / "none.zarr")])
    assert missing.exit_code == 2
    assert "no store" in missing.stderr
