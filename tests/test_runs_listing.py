"""Roots of runs: listing, looking up, moving, merging, pruning; files that diffman 0.3.0 wrote."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from projects import PTYCHO_PROJECT, Project
from test_runs_findings import TWO_STAGES

import diffract_dask.runs as dm
from diffract_dask.errors import RunNotFoundError
from diffract_dask.runs import encoding, snapshots


@pytest.fixture
def ablation(project: Project) -> Project:
    project.write_all(PTYCHO_PROJECT)
    chain = project.load("chains.ptycho").CHAIN
    for variation in chain.variations.values():
        variation.run(project.runs)
    return project


def test_runs_are_listed_newest_first_and_filtered(ablation: Project) -> None:
    runs = ablation.runs
    every = runs.list_runs()
    assert [run.started for run in every] == sorted((run.started for run in every), reverse=True)
    assert len(runs.list_runs("recon")) == 4
    assert len(runs.list_runs("recon", "DM")) == 1
    assert len(runs.list_runs(variation="algo_dm")) == 4
    assert len(runs.list_runs(chain="ptycho", variant="base")) == 1
    assert runs.list_runs(status="failed") == runs.list_runs("nothing") == runs.list_runs(chain="x") == []


def test_a_run_is_found_by_the_start_of_its_fingerprint(ablation: Project) -> None:
    runs = ablation.runs
    record = runs.list_runs("recon", "DM")[0]
    assert runs.get("recon", "DM", record.fingerprint[:5]) is record
    assert runs.at(record.where) is record
    assert runs.exact("recon", "DM", record.fingerprint) is record
    assert runs.exact("recon", "DM", "0" * 64) is None
    assert runs.find(record.short_fp) == [record]
    for missing in (lambda: runs.get("recon", "DM", "zz"), lambda: runs.at("recon/DM/zz"), lambda: runs.at("../x/y")):
        with pytest.raises(RunNotFoundError):
            missing()
    with pytest.raises(RunNotFoundError, match="give more digits"):
        runs.get("recon", "ePIE", "")
    with pytest.raises(RunNotFoundError, match="Did you mean 'recon/DM'"):
        runs.get("recon", "DMM", "00")


def test_what_changes_on_disk_is_seen_by_a_registry_that_is_open(project: Project) -> None:
    runs, other = project.runs, project.runs
    assert runs.list_runs() == []
    pipeline = project.declare("two", TWO_STAGES + "dm.register('other', a=3, b=2)\n").PIPELINE
    pipeline.run("base", other, only="first")
    assert [run.status for run in runs.list_runs()] == ["partial"]
    pipeline.run("base", other)
    assert [run.status for run in runs.list_runs()] == ["done"]
    record = pipeline.run("other", other)
    assert len(runs.list_runs()) == 2
    shutil.rmtree(record.fdir)
    assert len(runs.list_runs()) == 1
    shutil.rmtree(project.folder / "runs")
    assert runs.list_runs() == []


def test_files_that_are_no_run_are_left_out(project: Project) -> None:
    record = project.declare("two", TWO_STAGES).PIPELINE.run("base", project.runs)
    above = Path(record.fdir).parent
    for i, text in enumerate(("", "{", "[]", "3", '{"pipeline": 1}', '{"pipeline": "p", "variant": "v"}')):
        (above / f"bad{i}").mkdir()
        (above / f"bad{i}" / "run.json").write_text(text)
    (project.folder / "runs" / "file.txt").write_text("")
    assert [run.fingerprint for run in project.runs.list_runs()] == [record.fingerprint]


def test_a_record_with_wrong_types_or_unknown_keys_is_read(project: Project) -> None:
    record = project.declare("two", TWO_STAGES).PIPELINE.run("base", project.runs)
    path = Path(record.fdir) / "run.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "stages": "x", "metrics": [], "schema": 99, "news": 1, "fdir": "/etc"}))
    (found,) = project.runs.list_runs()
    assert (found.stages, found.metrics, found.schema) == ([], {}, 99)
    assert found.fdir == record.fdir


@pytest.mark.parametrize("how", ["moved", "copied", "symlinked", "elsewhere"])
def test_a_root_can_be_moved_copied_and_linked(
    ablation: Project, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    old, new = ablation.folder / "runs", ablation.folder / "new root"
    if how == "moved":
        old.rename(new)
    elif how == "copied":
        shutil.copytree(old, new, symlinks=True)
        shutil.rmtree(old)
    elif how == "symlinked":
        new.symlink_to(old)
    else:
        monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))
        new = old
    runs = dm.RunRegistry(new)
    catalog = dm.Catalog(runs, live=False)
    assert dm.progress(catalog, "ptycho", "algo_dm").status == "done"
    for record in runs.list_runs():
        assert all(not output.missing and output.sha256 for output in runs.outputs(record))
    text = "".join(path.read_text() for path in new.glob("*/*/*/run.json")) + "".join(
        path.read_text() for path in new.glob("_manifests/*.json")
    )
    assert str(ablation.folder) not in text.replace(json.dumps(str(ablation.folder))[1:-1] + "/.pytest", "")
    again = ablation.load("chains.ptycho").CHAIN.variations["algo_dm"].run(runs)
    assert {status for record in again.values() for status in record.stage_status.values()} == {"cached"}


def test_two_roots_copied_together_read_as_one(project: Project) -> None:
    module = project.declare("two", TWO_STAGES + "dm.register('other', a=3, b=2)\n")
    one, other = dm.RunRegistry("one"), dm.RunRegistry("other")
    module.PIPELINE.run("base", one)
    changed = project.declare("two", TWO_STAGES.replace("* 10", "* 11") + "dm.register('other', a=3, b=2)\n")
    records = [changed.PIPELINE.run(name, other) for name in ("base", "other")]
    subprocess.run(["cp", "-r", "other/.", "one"], check=True)
    runs = dm.RunRegistry("one")
    assert len(runs.list_runs()) == 3
    for record in runs.list_runs():
        assert "def scale" in str(snapshots.show(runs.root, record.snapshot, record.sources["two"]))
    found = dm.why(runs, *[run for run in runs.list_runs("two", "base")])
    assert "code" in found.reasons
    assert found.sources[0].diff
    assert {record.short_fp for record in records} <= {run.short_fp for run in runs.list_runs()}
    assert changed.PIPELINE.run("base", runs).stage_status == {"first": "cached", "second": "cached"}


def test_merging_keeps_what_both_sides_know(project: Project) -> None:
    project.write_all(PTYCHO_PROJECT)
    chain = project.load("chains.ptycho").CHAIN
    one, other = dm.RunRegistry("one"), dm.RunRegistry("other")
    chain.variations["baseline"].run(one)
    for name in ("algo_dm", "jitter_low"):
        chain.variations[name].run(other)
    merged = dm.merge(one, "other")
    assert (len(merged.added), len(merged.both)) == (6, 2)
    catalog = dm.Catalog(one, live=False)
    for name in ("baseline", "algo_dm", "jitter_low"):
        assert dm.progress(catalog, "ptycho", name).status == "done"
    (shared,) = one.list_runs("forward_sim", "base")
    assert [at["variation"] for at in shared.memberships] == ["baseline", "algo_dm"]
    assert len(list((Path(shared.fdir) / "invocations").glob("*.json"))) == 2
    for record in one.list_runs():
        assert snapshots.show(one.root, record.snapshot, next(iter(record.sources.values())))
    assert dm.merge(one, "other").added == []


def test_runs_of_diffman_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "runs/sim/base/4671739caaaa"
    stage = folder / "stages/sim"
    (stage / "outputs").mkdir(parents=True)
    (stage / "outputs/x.txt").write_text("data")
    (folder / "run.json").write_text(
        json.dumps(
            {
                "pipeline": "sim",
                "variant": "base",
                "fingerprint": "4671739c" + "a" * 56,
                "fdir": "runs/sim/base/4671739caaaa",
                "started": "2026-01-02T03:04:05",
                "ended": None,
                "stage_keys": {"sim": "b" * 64, "bad": "c" * 64},
                "stage_status": {"sim": "done", "bad": "failed"},
                "errors": {"bad": "Traceback"},
                "git_rev": None,
                "host": "h",
                "chain": "c",
                "variation": "v",
                "upstream": {"a": "d" * 64},
            },
            indent=2,
        )
    )
    (folder / "config.json").write_text('{"amp": 0.1, "bad": NaN, "l": [1, 2]}')
    (stage / "metrics.json").write_text('{"rmse": 0.5, "nan": NaN, "algo": "ePIE"}')
    meta = {"name": "sim", "key": "b" * 64, "started": 1.0, "ended": 2.0}
    parts = {"fn": "e" * 64, "config": {"amp": 0.1}, "upstream": {"x": "f" * 64}}
    (stage / "_meta.json").write_text(json.dumps({**meta, "components": parts}))
    (stage / "_key").write_text("b" * 64)
    other = tmp_path / "runs/sim/base/5671739caaaa"
    shutil.copytree(folder, other)
    text = (other / "run.json").read_text().replace("4671739c", "5671739c")
    (other / "run.json").write_text(text)
    (other / "stages/sim/_meta.json").write_text(json.dumps({**meta, "components": {**parts, "config": {"amp": 7}}}))

    runs = dm.RunRegistry(tmp_path / "runs")
    record = runs.get("sim", "base", "4671")
    assert (record.status, record.schema, record.stages) == ("failed", 0, ["sim", "bad"])
    assert record.fdir == str(folder)
    assert str(record.started).startswith("2026-01-02T03:04:05")
    assert len(str(record.started)) > len("2026-01-02T03:04:05"), "with a zone"
    assert runs.config(record).l == [1, 2]
    assert runs.metrics(record)["sim"]["rmse"] == dm.Metric(0.5)
    assert [output.path for output in runs.outputs(record)] == ["stages/sim/outputs/x.txt"]
    assert record.memberships[0]["chain"] == "c"
    found = dm.why(runs, record, runs.get("sim", "base", "5671"))
    assert [entry.path for entry in found.stages[0].entries] == ["amp"]
    json.dumps(dm.as_json([record, found, runs.metrics(record), runs.config(record)]), allow_nan=False)


def test_links_count_as_missing_when_what_they_lead_to_is_gone(project: Project) -> None:
    source = """
dm.register('v')
def f(ctx): ctx.artifact('s', 'x', 'data', how='link')
PIPELINE = dm.Pipeline('p', [dm.Stage('s', f)])
"""
    (project.folder / "data").write_text("1234")
    pipeline = project.declare("p", source).PIPELINE
    record = pipeline.run("v", project.runs)
    assert pipeline.run("v", project.runs).stage_status == {"s": "cached"}
    (project.folder / "data").write_text("123456")
    assert pipeline.run("v", project.runs).stage_status == {"s": "done"}, "what it leads to has changed"
    (project.folder / "data").unlink()
    (output,) = project.runs.outputs(record)
    assert (output.link, output.missing, output.size) == (True, True, 6)
    dm.disk_usage(project.runs)


def test_disk_usage_counts_shared_files_once(project: Project) -> None:
    big = TWO_STAGES.replace("str(scale(ctx.config.a))", "'x' * 100000")
    first = project.declare("two", big).PIPELINE.run("base", project.runs)
    one = dm.disk_usage(project.runs)
    second = project.declare("two", big.replace("b=2", "b=3")).PIPELINE.run("base", project.runs)
    two = dm.disk_usage(project.runs)
    assert one.total > 200000  # x.txt, and y.txt made from it
    assert 100000 < two.total - one.total < 190000
    assert {run.run for run in two.runs} == {first.where, second.where}
    assert all(run.size > 200000 > run.own > 100000 for run in two.runs)
    assert sum(two.pipelines.values()) + two.snapshots == two.total


def test_prune_says_first_and_removes_then(project: Project) -> None:
    pipeline = project.declare("two", TWO_STAGES).PIPELINE
    good = pipeline.run("base", project.runs)
    bad = project.declare("two", TWO_STAGES.replace("a=1", "a='x'").replace("value * 10", "value * 'y'"))
    with pytest.raises(TypeError):
        bad.PIPELINE.run("base", project.runs)
    (told,) = dm.prune(project.runs)
    assert (told.removed, told.reason) == (False, "it is failed")
    assert len(project.runs.list_runs()) == 2
    (done,) = dm.prune(project.runs, dry_run=False)
    assert done.removed
    assert not (project.folder / "runs" / done.run).exists()
    assert [run.fingerprint for run in project.runs.list_runs()] == [good.fingerprint]
    assert dm.prune(project.runs, status=["done"], older_than_days=1) == []
    assert dm.prune(project.runs, status=["done"], pipeline="other") == []


def test_prune_keeps_what_others_were_computed_from(ablation: Project) -> None:
    runs = ablation.runs
    upstream = [item for item in dm.prune(runs, status=["done"], pipeline="forward_sim", dry_run=False)]
    assert len(upstream) == 3
    assert all(not item.removed and "was computed from it" in str(item.kept) for item in upstream)
    everything = dm.prune(runs, status=["done"], dry_run=False)
    assert all(item.removed for item in everything)
    assert runs.list_runs() == []
    assert not any(path.is_dir() and path.name[0] not in "._" for path in runs.root.iterdir())


def test_prune_keeps_the_newest_of_each_variant(project: Project) -> None:
    for factor in (10, 11, 12):
        record = project.declare("two", TWO_STAGES.replace("* 10", f"* {factor}")).PIPELINE.run("base", project.runs)
        time.sleep(0.01)
    found = dm.prune(project.runs, status=(), keep_last=1, dry_run=False)
    assert [item.removed for item in found] == [True, True]
    assert [run.fingerprint for run in project.runs.list_runs()] == [record.fingerprint]


def test_files_are_replaced_at_once_and_leave_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    encoding.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        encoding.write_json(path, {"a": object()})
    assert encoding.read_json(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_registry_takes_three_ways_of_reuse(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'link', 'copy' or 'no'"):
        dm.RunRegistry(tmp_path, reuse="steal")
    assert not (tmp_path / "runs").exists()
