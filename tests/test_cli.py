"""The command line, run through click's runner: what is printed, where, and with which exit code."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import xarray as xr
from click.testing import CliRunner, Result

import diffract_dask
from diffract_dask.cli import ANALYZE_FIELDS, cli
from diffract_dask.config import load
from diffract_dask.testing import random_model, write_safetensors

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {"analyze", "add", "models", "compute", "plan", "show", "status", "fields", "export", "erase", "demo"}


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "h.2.attn.weight": rng.normal(size=(24, 16)).astype(np.float32),
        "h.10.attn.weight": rng.normal(size=(24, 16)).astype(np.float32),
        "head.weight": np.eye(6, 4, dtype=np.float32),
        "zero.weight": np.zeros((5, 5), np.float32),
        "head.bias": np.ones(6, np.float32),
        "row.weight": np.ones((1, 6), np.float32),
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_safetensors(tmp_path / "base.safetensors", arrays())


class Cli:
    """The command with a store of its own."""

    def __init__(self, store: Path) -> None:
        self.store = store

    def __call__(self, *args: object, code: int = 0, **options: Any) -> Result:
        argv = ["--store", str(self.store), *map(str, args)]
        result = CliRunner().invoke(cli, argv, catch_exceptions=False, **options)
        assert result.exit_code == code, (result.stdout, result.stderr)
        return result

    def error(self, *args: object) -> str:
        result = self(*args, code=2)
        lines = result.stderr.strip().split("\n")
        assert len(lines) <= 2, result.stderr
        assert lines[-1].startswith("error: ")
        return lines[-1]

    def json(self, *args: object) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = json.loads(self(*args, "--format", "json").stdout)
        return made


@pytest.fixture
def run(tmp_path: Path) -> Cli:
    return Cli(tmp_path / "store.zarr")


@pytest.fixture
def analysed(run: Cli, checkpoint: Path) -> Cli:
    run("analyze", checkpoint)
    return run


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """An analysed store for tests that only read."""
    folder = tmp_path_factory.mktemp("reading")
    run = Cli(folder / "store.zarr")
    run("analyze", write_safetensors(folder / "base.safetensors", arrays()))
    return run


# ------------------------------------------------------------------------------------------- help


def test_the_commands_are_those_documented() -> None:
    assert set(cli.commands) == COMMANDS


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_with_examples_that_exist(command: str) -> None:
    text = CliRunner().invoke(cli, [command, "--help"]).stdout
    examples = re.findall(rf"^ +diffract-dask {command}\b(.*)$", text, re.MULTILINE)
    assert "Examples:" in text
    assert examples
    known = {name for p in cli.commands[command].params for name in p.opts}
    for example in examples:
        assert set(re.findall(r"(?<=\s)--?[a-z][a-z-]*(?=\s|=|$)", example)) - {"-stable_rank"} <= known | {"-f"}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_option_says_what_it_does(command: str) -> None:
    for parameter in cli.commands[command].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name


def test_without_a_command_help_is_shown() -> None:
    result = CliRunner().invoke(cli, [])
    assert result.exit_code == 0
    assert "Examples:" in result.stdout


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['diffract-dask', '--help']\n"
        "from diffract_dask.cli import cli\n"
        "try: cli()\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'dask', 'xarray', 'zarr', 'scipy', 'pandas', 'distributed'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    times = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT)
        times.append(time.perf_counter() - start)
    assert min(times) < 1.0  # 0.2 s on a quiet machine


def test_python_dash_m_and_version() -> None:
    argv = [sys.executable, "-m", "diffract_dask", "--version"]
    shown = subprocess.run(argv, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert shown.split()[-1] == diffract_dask.__version__


# ------------------------------------------------------------------------------------------- analyze


def test_analyze_prints_every_analysed_parameter_and_counts_the_skipped(run: Cli, checkpoint: Path) -> None:
    text = run("analyze", checkpoint).stdout
    for name in ("h.2.attn.weight", "h.10.attn.weight", "head.weight", "zero.weight"):
        assert name in text
    assert "head.bias" not in text
    assert re.search(r"base: 4 parameters analysed, 2 skipped: .*vector 1", text)
    assert "single_row 1" in text
    header = "".join(text.split("---")[0].split())
    assert all(part in header for field in ANALYZE_FIELDS for part in field.split("_"))


def test_analyze_computes_the_right_numbers(run: Cli, checkpoint: Path) -> None:
    rows = {row["name"]: row for row in run.json("analyze", checkpoint)}
    for name in ("h.2.attn.weight", "h.10.attn.weight", "head.weight"):
        weights = arrays()[name].astype(np.float64)
        svals = np.linalg.svd(weights, compute_uv=False)
        assert rows[name]["frob_norm"] == pytest.approx(np.linalg.norm(weights), rel=1e-6)
        assert rows[name]["l2_norm"] == pytest.approx(svals[0], rel=1e-6)
        assert rows[name]["nuclear_norm"] == pytest.approx(svals.sum(), rel=1e-6)
        assert rows[name]["stable_rank"] == pytest.approx((svals**2).sum() / svals[0] ** 2, rel=1e-6)
        assert rows[name]["weights_std"] == pytest.approx(weights.std(), rel=1e-6)
        assert rows[name]["shape"] == list(weights.shape)
    assert rows["head.weight"]["hard_rank"] == 4
    assert rows["zero.weight"]["frob_norm"] == 0
    assert rows["zero.weight"]["stable_rank"] is None  # undefined
    assert all(row["nonfinite_fraction"] == 0 for row in rows.values())


@pytest.mark.filterwarnings("ignore::diffract_dask.errors.LinkBrokenWarning")
def test_analyze_links_the_file(analysed: Cli, checkpoint: Path) -> None:
    stored = sum(file.stat().st_size for file in analysed.store.rglob("*") if "weights" in file.parts)
    assert stored == 0
    checkpoint.unlink()
    assert len(analysed.json("show", "stable_rank")) == 4  # results need no file
    assert "base.safetensors" in analysed.error("compute", "weights_lsvs")


def test_analyze_again_computes_nothing_and_adds_nothing(
    analysed: Cli, checkpoint: Path, request: pytest.FixtureRequest
) -> None:
    before = analysed("models", "--format", "csv").stdout
    request.getfixturevalue("no_compute")
    again = analysed("analyze", checkpoint)
    assert "h.10.attn.weight" in again.stdout
    assert re.search(r"\b0 values computed", again.stderr)
    assert analysed("models", "--format", "csv").stdout == before


def test_analyze_again_on_a_changed_file_takes_the_new_weights(analysed: Cli, checkpoint: Path) -> None:
    changed = arrays()
    changed["head.weight"] = 2 * changed["head.weight"]
    write_safetensors(checkpoint, changed)
    os.utime(checkpoint, ns=(0, 10**18))
    rows = {row["name"]: row for row in analysed.json("analyze", checkpoint)}
    assert rows["head.weight"]["l2_norm"] == pytest.approx(2)
    assert len(analysed.json("models")) == 1


def test_analyze_refuses_another_file_of_the_same_name(analysed: Cli, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = write_safetensors(tmp_path / "other" / "base.safetensors", arrays())
    assert "--id" in analysed.error("analyze", other)
    analysed("analyze", other, "--id", "second")
    assert [row["model_id"] for row in analysed.json("models")] == ["base", "second"]


def test_a_warning_is_one_line(run: Cli, checkpoint: Path) -> None:
    run("add", checkpoint)
    lines = run("add", checkpoint, "--id", "again").stderr.strip().split("\n")
    assert len(lines) == 1
    assert re.fullmatch(r"warning: .*same content.*", lines[0])


def test_analyze_copies_what_cannot_be_linked(run: Cli, tmp_path: Path) -> None:
    path = tmp_path / "packed.npz"
    np.savez_compressed(path, **{"fc.weight": arrays()["head.weight"]})
    result = run("analyze", path)
    assert "fc.weight" in result.stdout
    assert "copied, not linked" in result.stderr
    path.unlink()
    run("compute", "weights_lsvs")


def test_analyze_takes_steps_from_the_names_of_files(run: Cli, tmp_path: Path) -> None:
    paths = [write_safetensors(tmp_path / f"run-{n}.safetensors", random_model([(4, 3)], seed=n)) for n in (10, 2)]
    run("analyze", *paths, "--step", "auto")
    assert [(row["model_id"], row["step"]) for row in run.json("models")] == [("run-2", 2), ("run-10", 10)]


def test_a_generic_file_name_gives_way_to_its_folder(run: Cli, tmp_path: Path) -> None:
    (tmp_path / "MiniLM").mkdir()
    run("add", write_safetensors(tmp_path / "MiniLM" / "model.safetensors", arrays()))
    assert run.json("models")[0]["model_id"] == "MiniLM"


def test_a_model_with_nothing_to_analyse_says_so(run: Cli, tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "tiny.safetensors", {"bias": np.ones(3, np.float32)})
    result = run("analyze", path)
    assert "warning:" in result.stderr
    assert "0 parameters analysed, 1 skipped" in result.stdout


@pytest.mark.parametrize("width", [80, 120, 200])
def test_tables_fit(reading: Cli, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    from diffract_dask import terminal

    monkeypatch.setattr(terminal, "terminal_width", lambda: width)
    for command in (["show"], ["models"], ["status"]):
        lines = reading(*command).stdout.split("\n")
        assert max(map(len, lines)) <= width, command


# ------------------------------------------------------------------------------------------- show


def test_show_sorts_filters_and_selects(reading: Cli) -> None:
    by_rank = [row["name"] for row in reading.json("show", "stable_rank", "--sort", "-stable_rank")]
    values = [row["stable_rank"] for row in reading.json("show", "stable_rank", "--sort", "-stable_rank")]
    assert values[-1] is None
    assert values[:-1] == sorted(values[:-1], reverse=True)
    up = [row["name"] for row in reading.json("show", "stable_rank", "--sort", "stable_rank")]
    assert up == [*by_rank[:-1][::-1], by_rank[-1]]
    names = [row["name"] for row in reading.json("show", "stable_rank", "--sort", "name")]
    assert names.index("h.2.attn.weight") < names.index("h.10.attn.weight")
    kept = reading.json("show", "stable_rank", "--filter", "stable_rank>4.5")
    assert {row["name"] for row in kept} == {"h.2.attn.weight", "h.10.attn.weight"}
    assert reading.json("show", "hard_rank", "--filter", "hard_rank<=4", "--filter", "name~head")[0]["hard_rank"] == 4
    assert len(reading.json("show", "stable_rank", "--name", "h.*", "--model", "ba*")) == 2


def test_show_prints_all_stored_scalars_by_default(reading: Cli) -> None:
    assert set(ANALYZE_FIELDS) <= set(reading.json("show")[0])


def test_show_prints_a_dash_where_nothing_was_computed(analysed: Cli, tmp_path: Path) -> None:
    analysed("add", write_safetensors(tmp_path / "late.safetensors", {"new.weight": arrays()["head.weight"] + 1}))
    analysed("compute", "aspect_ratio", "--model", "late")
    line = next(line for line in analysed("show", "aspect_ratio", "stable_rank").stdout.split("\n") if "late" in line)
    assert line.split()[-2:] == ["1.5", "-"]


def test_show_csv_reads_back(reading: Cli) -> None:
    rows = list(csv.DictReader(io.StringIO(reading("show", "stable_rank", "--format", "csv").stdout)))
    assert [row["name"] for row in rows] == [row["name"] for row in reading.json("show", "stable_rank")]
    exact = {row["name"]: row["stable_rank"] for row in reading.json("show", "stable_rank")}
    assert float(rows[0]["stable_rank"]) == exact[rows[0]["name"]]


def test_show_gives_model_level_fields_a_row_per_model(analysed: Cli) -> None:
    analysed("compute", "param_norm")
    (row,) = analysed.json("show", "param_norm")
    frob = [r["frob_norm"] for r in analysed.json("show", "frob_norm")]
    assert row["model_id"] == "base"
    assert row["param_norm"] == pytest.approx(sum(x**2 for x in frob))
    both = analysed("show", "frob_norm", "param_norm").stdout
    assert len(both.split("\n\n")) == 2
    assert "one at a time" in analysed.error("show", "frob_norm", "param_norm", "--format", "csv")


# ------------------------------------------------------------------------------------------- the others


def test_compute_reuses_and_a_changed_parameter_computes_again(analysed: Cli) -> None:
    assert "0 values computed" in analysed("compute", "hard_rank").stdout
    changed = analysed("compute", "hard_rank", "--param", "hard_rank.rtol=0.5").stdout
    assert "4 values computed" in changed


def test_plan_computes_nothing(reading: Cli, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("no_compute")
    text = reading("plan", "weights_kurtosis", "hard_rank", "--param", "hard_rank.rtol=0.5").stdout
    assert "hard_rank" in text
    assert "memory" in text
    assert "nothing to do" in reading("plan", "stable_rank").stdout


def test_status_counts_and_gives_reasons(reading: Cli) -> None:
    lines = [line.split() for line in reading("status", "stable_rank", "aspect_ratio").stdout.split("\n") if line]
    assert lines[0] == ["field", "fresh", "missing"]
    assert lines[2:4] == [["stable_rank", "4", "-"], ["aspect_ratio", "-", "4"]]
    assert any("not defined" in " ".join(line) for line in lines)  # stable_rank of the zero matrix


def test_fields_is_the_catalogue_and_prints_definitions(run: Cli) -> None:
    rows = {row["field"]: row for row in run.json("fields")}
    assert set(ANALYZE_FIELDS) <= set(rows)
    assert rows["param_norm"]["level"] == "model"
    text = run("fields", "stable_rank").stdout
    assert "Stable rank" in text
    assert "frob_norm, l2_norm" in text
    assert "rtol" in run("fields", "hard_rank").stdout
    assert all("rank" in row["field"] + row["title"].lower() for row in run.json("fields", "--find", "RANK"))
    assert "stable_rank" in run.error("fields", "stable_rnk")
    assert not run.store.exists()


@pytest.mark.parametrize("suffix", ["csv", "json", "nc"])
def test_export_writes_what_the_suffix_says(reading: Cli, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"results.{suffix}"
    reading("export", path, "stable_rank", "hard_rank")
    expected = {row["name"]: row["stable_rank"] for row in reading.json("show", "stable_rank")}
    if suffix == "csv":
        found = {r["parameter_name"]: r["stable_rank"] for r in csv.DictReader(io.StringIO(path.read_text()))}
        assert float(found["head.weight"]) == expected["head.weight"]
        assert len(found) == 4
    elif suffix == "json":
        records = json.loads(path.read_text()).values()
        assert {r["metadata"]["name"]: r["fields"]["stable_rank"] for r in records} == expected
    else:
        pytest.importorskip("netCDF4")
        with xr.open_dataset(path) as dataset:
            assert float(dataset.stable_rank.sel(model_id="base", name="head.weight")) == expected["head.weight"]


def test_erase_asks_and_erases(analysed: Cli) -> None:
    assert "nothing was erased" in analysed("erase", "hard_rank", code=2, input="n\n").stderr
    assert "--yes" in analysed("erase", "hard_rank", code=2, input="").stderr
    assert len(analysed.json("show", "hard_rank")) == 4
    analysed("erase", "hard_rank", input="y\n")
    assert analysed.json("show", "hard_rank") == []
    assert len(analysed.json("show", "stable_rank")) == 4


def test_erase_removes_models_only_when_told_to(analysed: Cli) -> None:
    assert "--whole-models" in analysed.error("erase", "--model", "base", "--yes")
    assert "--whole-models" in analysed.error("erase", "--whole-models", "--yes")
    assert "no model" in analysed.error("erase", "--whole-models", "--model", "bse", "--yes")
    analysed("erase", "--whole-models", "--model", "base", "--yes")
    assert analysed.json("models") == []


# ------------------------------------------------------------------------------------------- store, settings and errors


def test_the_store_option_goes_before_or_after_the_command(run: Cli, checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.zarr"
    run("add", checkpoint, "--store", other)
    assert other.exists()
    assert not run.store.exists()


def test_the_store_comes_from_the_settings(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(cli, ["add", str(checkpoint)]).exit_code == 0
    assert (tmp_path / "diffract.zarr").exists()
    (tmp_path / "settings.yaml").write_text("store: configured.zarr\n")
    assert CliRunner().invoke(cli, ["--config", "settings.yaml", "add", str(checkpoint)]).exit_code == 0
    assert (tmp_path / "configured.zarr").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_example_configurations_hold_known_settings(path: Path) -> None:
    assert load(path)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["show"], "there is no store"),
        (["models"], "there is no store"),
        (["analyze", "missing.safetensors"], "does not exist"),
        (["analyse"], "analyze"),
        (["show", "--srt", "x"], "--sort"),
        (["fields", "nothing_like_it"], "nothing_like_it"),
        (["--config", "missing.yaml", "models"], "missing.yaml"),
    ],
)
def test_user_errors_are_one_line_and_exit_2(run: Cli, argv: list[str], expected: str) -> None:
    assert expected in run.error(*argv)
    assert not run.store.exists()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["show", "stable_rnk"], "stable_rank"),
        (["show", "stable_rank", "--filter", "stable_rank>>x"], "stable_rank"),
        (["show", "stable_rank", "--filter", "stable_rank"], "condition"),
        (["show", "stable_rank", "--filter", "stable_rank>many"], "not a number"),
        (["show", "stable_rank", "--sort", "stable_rnk"], "stable_rank"),
        (["show", "--name", "re:("], "regular expression"),
        (["compute", "stable_rnk"], "stable_rank"),
        (["compute", "hard_rank", "--param", "hard_rank.rtl=1"], "rtol"),
        (["compute", "hard_rank", "--param", "rtol=1"], "KERNEL.NAME=VALUE"),
        (["plan", "stable_rnk"], "stable_rank"),
        (["export", "x.unknown", "stable_rank"], ".csv"),
        (["export", "no/such/folder/x.csv", "stable_rank"], "no folder"),
        (["erase", "stable_rnk", "--yes"], "stable_rank"),
    ],
)
def test_wrong_requests_name_the_remedy(reading: Cli, argv: list[str], expected: str) -> None:
    assert expected in reading.error(*argv)


def test_a_broken_file_is_an_error_without_traceback(run: Cli, checkpoint: Path) -> None:
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[: len(content) // 2])
    assert "base.safetensors" in run.error("analyze", checkpoint)


def test_an_error_of_the_operating_system_names_the_file(run: Cli, checkpoint: Path, tmp_path: Path) -> None:
    run.store.write_text("a file where the store should be")
    assert "store.zarr" in run.error("add", checkpoint)


def test_two_files_cannot_share_an_id(run: Cli, checkpoint: Path) -> None:
    assert "--id" in run.error("add", checkpoint, checkpoint, "--id", "x")


def test_demo_runs_in_the_folder_that_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called = []
    monkeypatch.setattr("diffract_dask.demo.run", lambda folder: called.append(folder))
    assert CliRunner().invoke(cli, ["demo", str(tmp_path / "d")], catch_exceptions=False).exit_code == 0
    assert called == [tmp_path / "d"]


def test_a_file_that_no_source_reads_leaves_no_store(run: Cli, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not weights")
    for command in ("analyze", "add"):
        assert "notes.txt" in run.error(command, tmp_path / "notes.txt")
        assert not run.store.exists()


def test_messages_name_options_and_not_arguments(analysed: Cli, checkpoint: Path) -> None:
    message = analysed.error("add", checkpoint)
    assert "--replace" in message
    assert "=True" not in message


def test_a_folder_that_does_not_exist_is_named(reading: Cli, tmp_path: Path) -> None:
    message = reading.error("export", tmp_path / "no" / "results.csv")
    assert str(tmp_path / "no") in message
    assert "partial" not in message


def test_rows_are_chosen_by_step(run: Cli, checkpoint: Path) -> None:
    run("add", checkpoint, "--id", "early", "--step", "10")
    run("add", checkpoint, "--id", "late", "--step", "20")
    run("compute", "stable_rank")
    rows = run.json("show", "stable_rank", "--filter", "step>10")
    assert {row["model_id"] for row in rows} == {"late"}
