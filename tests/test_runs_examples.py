"""The examples of diffman's documentation run as printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from projects import MYSIM, MYSIM_V2, PTYCHO_PROJECT, Project

import diffract_dask.runs as dm


def test_a_variant_of_a_fork_runs(project: Project) -> None:
    project.write(mysim=MYSIM, mysim_v2=MYSIM_V2)
    mysim_v2 = project.load("mysim_v2")

    rr = dm.RunRegistry(root="runs")
    mysim_v2.PIPELINE.run(dm.registry.get("mysim_v2", "jitter"), rr)

    (record,) = rr.list_runs()
    assert (record.pipeline, record.variant, record.parent, record.status) == ("mysim_v2", "jitter", "mysim", "done")
    np.testing.assert_array_equal(np.load(f"{record.fdir}/stages/sim/outputs/out.npy"), np.arange(4) * 8e-6)
    assert Path("out.npy").exists(), "an artifact never destroys its source"
    assert rr.config(record) == {"scan": {"width": 8e-6, "step": 1e-7}, "probe": {"jitter": True, "amp": 0.5}}


def test_the_base_runs_though_it_lacks_a_key_that_another_variant_has(project: Project) -> None:
    project.write(mysim=MYSIM)
    record = project.load("mysim").PIPELINE.run("base", project.runs)
    assert record.status == "done"


def test_layout_on_disk_is_the_documented_one(project: Project) -> None:
    project.write(mysim=MYSIM)
    record = project.load("mysim").PIPELINE.run("jitter", project.runs)
    folder = project.folder / "runs" / "mysim" / "jitter" / record.short_fp
    for name in ("run.json", "config.json", "run.log", *(f"stages/sim/{x}" for x in ("outputs/out.npy", "_meta.json"))):
        assert (folder / name).is_file(), name
    assert (folder / "stages/sim/_key").read_text() == record.stage_keys["sim"]
    log = subprocess.run(
        ["git", "log", "--format=%H %s", "--", "mysim.py"],
        cwd=project.folder / "runs/_scripts",
        capture_output=True,
        text=True,
        check=True,
    )
    assert log.stdout.strip() == f"{record.snapshot} run mysim/jitter/{record.short_fp}"


def test_the_ablation_runs_and_its_progress_follows_from_files_alone(project: Project) -> None:
    project.write_all(PTYCHO_PROJECT)
    project.python("run_ablation.py")

    catalog = project.catalog
    for name in ("baseline", "jitter_low", "jitter_high", "algo_dm"):
        found = dm.progress(catalog, "ptycho", name)
        assert (found.status, found.outdated) == ("done", False)
        assert [step.status for step in found.steps] == ["done"] * 4
    # Three amplitudes, three conversions, four reconstructions and analyses: what is shared is run once.
    assert len(catalog.runs.list_runs()) == 3 + 3 + 4 + 4
    (shared,) = catalog.runs.list_runs("forward_sim", "base")
    assert [(at["chain"], at["variation"], at["step"]) for at in shared.memberships] == [
        ("ptycho", "baseline", "forward_sim"),
        ("ptycho", "algo_dm", "forward_sim"),
    ]
    (analysed,) = catalog.runs.list_runs("analysis", variation="algo_dm")
    assert analysed.upstream.keys() == {"recon", "forward_sim"}
    assert analysed.upstream["forward_sim"] == shared.fingerprint
    assert "forward_sim" not in sys.modules


def test_running_the_ablation_again_computes_nothing(project: Project) -> None:
    project.write_all(PTYCHO_PROJECT)
    project.python("run_ablation.py")
    before = {path: path.stat().st_mtime_ns for path in (project.folder / "runs").rglob("*.json")}
    project.python("run_ablation.py")
    after = {path: path.stat().st_mtime_ns for path in (project.folder / "runs").rglob("*.json")}
    assert after == before


def test_the_scoreboard_has_every_variation_and_metric(project: Project) -> None:
    project.write_all(PTYCHO_PROJECT)
    project.python("run_ablation.py")
    board = dm.scoreboard(project.catalog, "ptycho", "baseline")
    assert [row.variation for row in board.rows] == ["baseline", "jitter_low", "jitter_high", "algo_dm"]
    assert [column.key for column in board.metrics] == [
        "analysis.frc.half_period_nm",
        "analysis.frc.score_at_half_period",
        "recon.recon.algo",
    ]
    low = board.rows[1]
    assert low.values["analysis.frc.score_at_half_period"] == pytest.approx(1.1)
    assert low.deltas == {
        "analysis.frc.half_period_nm": 0.0,
        "analysis.frc.score_at_half_period": pytest.approx(0.1),
    }


def test_the_api_is_the_documented_one() -> None:
    named = "Config Variant VariantRegistry Stage Pipeline Chain ChainStep Variation RunRegistry RunContext RunRecord"
    names = f"{named} fingerprint register registry discover load_module".split()
    assert set(names) <= set(dm.__all__)
    for name in dm.__all__:
        assert getattr(dm, name) is not None


def test_importing_and_running_loads_no_dask_xarray_or_zarr(project: Project) -> None:
    project.write_all(PTYCHO_PROJECT)
    # `lineage` reads a weight store and what compares artifacts reads arrays: only those load what they need for it.
    heavy = ("diff_artifacts", "diff_run_artifacts", "lineage", "list_artifacts", "preview", "preview_run_artifact")
    light = f"[getattr(dm, x) for x in dm.__all__ if x not in {heavy}]"
    code = f"import sys, diffract_dask.runs as dm; {light}; import run_ablation; "
    done = project.python("-W", "error", "-c", f"{code} print(*{{x.split('.')[0] for x in sys.modules}})")
    loaded = set(done.stdout.split())
    assert "run_ablation" in loaded
    assert not loaded & {"dask", "distributed", "xarray", "zarr", "numpy", "scipy", "click", "bokeh", "pandas"}
