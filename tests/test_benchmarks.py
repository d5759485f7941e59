"""Every benchmark runs, tiny; what it measures is not judged here."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import accuracy, large, overhead, run, workloads
from benchmarks.peers import bare_numpy, catalogue, fits, side_by_side

CASES = list(run.cases(tiny=True))
SUBJECTS = ("linalg", "moments", "engine", "store", "view", "random_matrix", "fits", "runs", "artifacts")


def test_there_are_benchmarks_of_every_subject() -> None:
    assert {case.module for case in CASES} == {f"bench_{x}" for x in SUBJECTS}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_benchmark_runs(case: run.Case) -> None:
    assert run.run_once(case) > 0


def test_full_size_params_have_the_same_form_as_the_tiny_ones() -> None:
    def form(params: tuple[object, ...]) -> list[str]:
        return [type(value).__name__ for value in params]

    tiny = {(case.module, case.cls, case.method): form(case.params) for case in CASES}
    full = {(case.module, case.cls, case.method): form(case.params) for case in run.cases()}
    assert tiny == full


def test_the_runner_writes_facts_and_figures(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    assert run.main(["InCore.time_singular_values((25, 384", "--seconds", "0", "--out", str(out)]) == 0
    written = json.loads(out.read_text(encoding="utf8"))
    assert written["machine"]["cores"] >= 1
    assert written["machine"]["versions"]["numpy"]
    assert [result["unit"] for result in written["results"]] == ["s", "s"]
    assert all(result["value"] > 0 for result in written["results"])


def test_bare_numpy_computes_what_the_fields_mean(tmp_path: Path) -> None:
    from diffract_dask import Session

    weights = workloads.matrices(2, 9, 5)
    with Session(profile="ram") as session:
        session.models.add(weights, "model")
        session.compute.apply(*workloads.SPECTRAL, "l2_norm")
        found = session.results.dataset(*workloads.SPECTRAL, "l2_norm")
    names = ("frob_norm", "l2_norm", "nuclear_norm", "stable_rank", "effective_rank", "hard_rank", "esd_max", "esd_min")
    for layer, w in weights.items():
        for name, expected in zip(names, bare_numpy.metrics(w), strict=True):
            assert float(found[name].sel(name=layer).item()) == pytest.approx(expected, rel=1e-6), name


def test_written_safetensors_are_read_by_others(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    path = tmp_path / "large.safetensors"
    workloads.write_safetensors(path, 10, 3, block=4)
    assert load_file(path)["weight"].shape == (10, 3)
    assert math.isfinite(bare_numpy.rows(path, path.stat().st_size - 120, (10, 3), block=4))


@pytest.mark.parametrize("subject", sorted(large.PARTS))
def test_large_runs_tiny(tmp_path: Path, subject: str) -> None:
    for part, run_part in large.PARTS[subject].items():
        if part != "cluster":
            assert run_part(tmp_path, 0.01)["apply"] > 0, part


def test_overhead_runs_tiny(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "overhead.json"
    assert overhead.main(["--tiny", "--repeats", "1", "--out", str(out)]) == 0
    written = json.loads(out.read_text(encoding="utf8"))
    (row,) = written["rows"]
    assert written["machine"]["cores"] >= 1
    assert 0 < row["bare"] < row["apply"]
    assert row["per_slice"] == pytest.approx((row["apply"] - row["bare"]) / row["count"])
    assert "| threads | 3 × 16² |" in capsys.readouterr().out


def test_llama_at_full_size_is_eight_gigabytes() -> None:
    sizes = [4 * math.prod(shape) for shape in large.llama_shapes(1.0).values()]
    assert 7.5e9 < sum(sizes) < 9e9


@pytest.mark.slow
def test_side_by_side_runs_tiny(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["--tiny", "--checkpoint", str(tmp_path / "none"), "--scratch", str(tmp_path), "--out", str(out)]
    assert side_by_side.main(arguments) == 0
    rows = json.loads(out.read_text(encoding="utf8"))["rows"]
    assert len(rows) == 14
    assert all(math.isfinite(row["figure"]) for row in rows)
    assert "left out: checkpoint" in capsys.readouterr().out


def test_fits_run_tiny(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fits.json"
    assert fits.main(["--tiny", "--out", str(out)]) == 0
    written = json.loads(out.read_text(encoding="utf8"))
    assert all(row["seconds"] > 0 for row in written["alone"])
    assert "limit" in capsys.readouterr().out


def test_the_catalogue_is_measured_beside_bare_numpy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "m.safetensors", tmp_path / "catalogue.json"
    workloads.write_safetensors(path, 40, 12)
    assert catalogue.main(["--only", "minilm", "--repeats", "1", "--checkpoint", str(path), "--out", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf8"))["minilm"]
    assert found["ours"]["matrices"] == found["bare_numpy"]["matrices"] == 1
    assert found["ours"]["seconds"][0] > 0
    assert "times as fast" in capsys.readouterr().out
    assert len(catalogue.CATALOGUE) == len(set(catalogue.CATALOGUE)) == 67
    assert set(catalogue.SPECTRAL_SET) <= set(catalogue.CATALOGUE)


def test_accuracy_is_measured_for_every_field() -> None:
    rows = accuracy.measure({"gauss": workloads.matrices(1, 12, 9)["layer.0.weight"].astype("f8")})
    assert all(row.against_definition < 1e-9 for row in rows)
    assert {row.field for row in rows} == {name for name, entry in accuracy.TABLE.items() if entry.value is not None}
    text = accuracy.table(rows)
    assert text.count("\n") == len(rows) + 1
