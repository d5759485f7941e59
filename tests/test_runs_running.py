"""Running pipelines: what is done again, what is taken over, what a stage may do, and what a failure leaves."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from projects import PTYCHO_PROJECT, Project
from test_runs_findings import TWO_STAGES, calls

import diffract_dask.runs as dm
from diffract_dask.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    DeclarationError,
    RunError,
    RunInputError,
    RunLockedError,
    UnknownNameError,
)
from diffract_dask.runs import encoding, leases, snapshots
from diffract_dask.runs.naming import folder

ONE_STAGE = """
import numpy as np, pathlib, os
dm.register('v', a=1)
def f(ctx):
    {body}
PIPELINE = dm.Pipeline('p', [dm.Stage('s', f), dm.Stage('t', print)])
"""


def in_a_stage(project: Project, body: str) -> dm.RunRecord:
    """Run a stage with these statements."""
    lines = body.strip("\n").replace("\n", "\n    ")
    return project.declare("p", ONE_STAGE.format(body=lines)).PIPELINE.run("v", project.runs, only="s")


def test_only_what_a_change_reaches_runs_again(project: Project) -> None:
    pipeline = project.declare("two", TWO_STAGES).PIPELINE
    pipeline.run("base", project.runs)
    assert calls(project) == ["first", "second"]
    changed = TWO_STAGES.replace("a=1, b=2", "a=1, b=3")
    record = project.declare("two", changed).PIPELINE.run("base", project.runs)
    assert calls(project) == ["second"]
    assert record.stage_status == {"first": "cached", "second": "done"}
    (kept,) = [run for run in project.runs.list_runs() if run.fingerprint == record.fingerprint]
    assert kept.stage_status == {"first": "cached", "second": "done"}
    by = kept.computed_by["first"]
    assert by["fingerprint"] != record.fingerprint
    assert project.runs.at(by["run"]).stage_status["first"] == "done"


@pytest.mark.parametrize("reuse", ["link", "copy", "no"])
def test_a_stage_is_taken_over_as_asked(project: Project, reuse: str) -> None:
    runs = dm.RunRegistry(project.folder / "runs", reuse=reuse)
    first = project.declare("two", TWO_STAGES).PIPELINE.run("base", runs)
    second = project.declare("two", TWO_STAGES.replace("b=2", "b=3")).PIPELINE.run("base", runs)
    files = [Path(record.fdir) / "stages/first/outputs/x.txt" for record in (first, second)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].samefile(files[1]) == (reuse == "link")
    assert calls(project).count("first") == (2 if reuse == "no" else 1)


def test_a_damaged_stage_is_not_taken_over(project: Project) -> None:
    first = project.declare("two", TWO_STAGES).PIPELINE.run("base", project.runs)
    path = Path(first.fdir) / "stages/first/outputs/x.txt"
    stat = path.stat()
    path.write_text("99")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as a bad disk would leave it
    second = project.declare("two", TWO_STAGES.replace("b=2", "b=3")).PIPELINE.run("base", project.runs)
    assert second.stage_status["first"] == "done"
    assert (Path(second.fdir) / "stages/first/outputs/x.txt").read_text() == "10"


def test_a_stage_that_vanishes_while_it_is_taken_over_is_computed(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.declare("two", TWO_STAGES).PIPELINE.run("base", project.runs)

    def vanish(source: Path, target: Path, how: str) -> None:
        target.write_text("half")
        raise FileNotFoundError(source)

    monkeypatch.setattr("diffract_dask.runs.outputs._take_file", vanish)
    second = project.declare("two", TWO_STAGES.replace("b=2", "b=3")).PIPELINE.run("base", project.runs)
    assert second.stage_status["first"] == "done"
    assert (Path(second.fdir) / "stages/first/outputs/x.txt").read_text() == "10"


def test_links_within_the_root_move_with_it_and_are_taken_over(project: Project) -> None:
    source = """
dm.register('v', a=1, b={b})
def f(ctx): ctx.artifact('f', 'x', ctx.upstream_artifact('up', 'stages/first/outputs'), how='link')
def g(ctx): pass
PIPELINE = dm.Pipeline('p', [dm.Stage('f', f, config_keys='a'), dm.Stage('g', g, config_keys='b')])
"""
    upstream = {"up": project.declare("two", TWO_STAGES).PIPELINE.run("base", project.runs)}
    for b in (1, 2):
        record = project.declare("p", source.format(b=b)).PIPELINE.run("v", project.runs, upstream=upstream)
    assert record.stage_status == {"f": "cached", "g": "done"}
    (project.folder / "runs").rename(project.folder / "moved")
    moved = dm.RunRegistry(project.folder / "moved")
    for record in moved.list_runs("p"):
        (output,) = moved.outputs(record, "f")
        assert (output.relpath, output.link, output.missing) == ("x/x.txt", True, False)
        assert (Path(record.fdir) / output.path).resolve().is_relative_to(moved.root)


def test_links_may_share_a_target_and_go_in_circles(project: Project) -> None:
    (project.folder / "d").mkdir()
    (project.folder / "d/x").write_text("1")
    record = in_a_stage(
        project,
        """
for name in 'ab': ctx.artifact('s', name, 'd', how='link')
(ctx.stage_dir() / 'outputs' / 'round').symlink_to('.')
""",
    )
    assert [item.relpath for item in project.runs.outputs(record, "s")] == ["a/x", "b/x"]


def test_running_a_linked_stage_again_leaves_the_other_run_alone(project: Project) -> None:
    first = project.declare("two", TWO_STAGES).PIPELINE.run("base", project.runs)
    pipeline = project.declare("two", TWO_STAGES.replace("b=2", "b=3")).PIPELINE
    second = pipeline.run("base", project.runs)
    pipeline.run("base", project.runs, force="first")
    files = [Path(record.fdir) / "stages/first/outputs/x.txt" for record in (first, second)]
    assert not files[0].samefile(files[1])
    assert files[0].read_text() == "10"


def test_a_forced_stage_makes_dependents_run_if_it_put_out_something_else(project: Project) -> None:
    source = TWO_STAGES.replace("scale(ctx.config.a)", "Path('given').read_text()")
    (project.folder / "given").write_text("one")
    pipeline = project.declare("two", source).PIPELINE
    pipeline.run("base", project.runs)
    calls(project)
    assert pipeline.run("base", project.runs, force={"first"}).stage_status == {"first": "done", "second": "cached"}
    (project.folder / "given").write_text("two")
    assert pipeline.run("base", project.runs, force="first").stage_status == {"first": "done", "second": "done"}
    assert calls(project) == ["first", "first", "second"]


def test_only_runs_no_others_and_needs_what_they_read(project: Project) -> None:
    pipeline = project.declare("two", TWO_STAGES).PIPELINE
    with pytest.raises(RunInputError, match="needs stage 'first', which is not done"):
        pipeline.run("base", project.runs, only="second")
    assert pipeline.run("base", project.runs, only="first").stage_status == {"first": "done", "second": "skipped"}
    (record,) = project.runs.list_runs()
    assert record.status == "partial"
    assert pipeline.run("base", project.runs, only=["second"]).status == "done"


def test_upstream_artifacts_that_are_declared_count_by_content(project: Project) -> None:
    source = """
dm.register('v', amp={amp})
def _up(ctx):
    ctx.artifact('up', 'sign.txt').write_text('+' if ctx.config.amp > 0 else '-')
    ctx.artifact('up', 'amp.txt').write_text(str(ctx.config.amp))
def _down(ctx):
    note('down ')
    ctx.upstream_artifact('a', 'stages/up/outputs/{read}')
def note(text):
    with open('calls', 'a') as file: file.write(text)
upper = dm.Pipeline('upper', [dm.Stage('up', _up)])
lower = dm.Pipeline('lower', [dm.Stage('down', _down, config_keys='none', upstream={declared})])
dm.register('w', none=1)
CHAIN = dm.Chain('c', [dm.ChainStep('a', upper), dm.ChainStep('b', lower, 'a')])
CHAIN.variation('x', a='v', b='w')
"""

    def run(amp: int, read: str, declared: str) -> dict[str, dm.RunRecord]:
        module = project.declare("chained", source.format(amp=amp, read=read, declared=declared))
        return module.CHAIN.variations["x"].run(project.runs)

    declared = "{'a': 'stages/up/outputs/sign.txt'}"
    first, second = run(1, "sign.txt", declared), run(2, "sign.txt", declared)
    assert first["b"].fingerprint != second["b"].fingerprint
    assert calls(project) == ["down"], "another run upstream, and what is read of it is the same"
    run(-1, "sign.txt", declared)
    assert calls(project) == ["down"]
    with pytest.raises(UnknownNameError, match=r"not among it; add it: Stage\(…, upstream="):
        run(1, "amp.txt", declared)
    with pytest.raises(RunInputError, match=r"does not have\. Did you mean 'stages/up/outputs/sign\.txt'"):
        run(1, "sign.txt", "{'a': 'stages/up/outputs/sing.txt'}")
    calls(project)
    run(1, "amp.txt", "'a'")
    run(2, "amp.txt", "'a'")
    assert calls(project) == ["down", "down"], "a step alone means all that its run put out"


def test_an_upstream_that_is_forced_counts_if_it_put_out_something_else(project: Project) -> None:
    source = """
from pathlib import Path
dm.register('v')
def _up(ctx): ctx.artifact('up', 'x', 'given')
def _down(ctx): ctx.metric('down', 'got', ctx.upstream_artifact('a', 'stages/up/outputs/x').read_text())
CHAIN = dm.Chain('c', [
    dm.ChainStep('a', dm.Pipeline('upper', [dm.Stage('up', _up)])),
    dm.ChainStep('b', dm.Pipeline('lower', [dm.Stage('down', _down)]), 'a'),
])
CHAIN.variation('x', a='v', b='v')
"""
    (project.folder / "given").write_text("one")
    variation = project.declare("chained", source).CHAIN.variations["x"]
    variation.run(project.runs)
    assert variation.run(project.runs, force={"a": "up"})["b"].stage_status == {"down": "cached"}
    (project.folder / "given").write_text("two")
    again = variation.run(project.runs, force={"a": "up"})["b"]
    assert (again.stage_status, again.metrics["down"]["got"]["value"]) == ({"down": "done"}, "two")
    with pytest.raises(UnknownNameError, match="Did you mean 'up'"):
        variation.run(project.runs, force={"a": "upp"})


def test_an_upstream_that_is_not_done_is_refused(project: Project) -> None:
    pipeline = project.declare("two", TWO_STAGES).PIPELINE
    partial = pipeline.run("base", project.runs, only="first")
    with pytest.raises(RunInputError, match="has not done second"):
        pipeline.run("base", project.runs, upstream={"x": partial})
    elsewhere = pipeline.run("base", dm.RunRegistry(project.folder / "elsewhere"))
    with pytest.raises(RunInputError, match="is not under"):
        pipeline.run("base", project.runs, upstream={"x": elsewhere})


@pytest.mark.parametrize(("raised", "status"), [("ValueError('x')", "failed"), ("KeyboardInterrupt", "interrupted")])
def test_what_stops_a_stage_is_on_record(project: Project, raised: str, status: str) -> None:
    with pytest.raises((ValueError, KeyboardInterrupt)):
        in_a_stage(project, f"raise {raised}")
    (record,) = project.runs.list_runs()
    assert (record.status, record.stage_status["s"]) == (status, status)
    assert record.ended is not None
    assert raised.split("(")[0] in record.errors["s"]
    assert f"s: {status}" in (Path(record.fdir) / "run.log").read_text()


def test_config_keys_may_be_dotted(project: Project) -> None:
    source = """
dm.register('v', probe=dict(amp={amp}, notes={notes!r}))
def f(ctx): note('f ')
def note(text):
    with open('calls', 'a') as file: file.write(text)
PIPELINE = dm.Pipeline('p', [dm.Stage('s', f, config_keys='probe.amp')])
"""
    for amp, notes, expected in ((1, "a", ["f"]), (1, "b", []), (2, "b", ["f"])):
        project.declare("p", source.format(amp=amp, notes=notes)).PIPELINE.run("v", project.runs)
        assert calls(project) == expected


def test_keys_that_no_stage_reads_are_noted(project: Project) -> None:
    record = project.declare("two", TWO_STAGES.replace("b=2)", "b=2, prbe=3)")).PIPELINE.run("base", project.runs)
    assert any("no stage reads the config keys prbe" in text for text in record.warnings)


def test_without_git_a_run_goes_on_and_says_so(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(project.folder))
    record = project.declare("two", TWO_STAGES).PIPELINE.run("base", project.runs)
    assert (record.status, record.snapshot) == ("done", None)
    assert record.warnings == ["no snapshot of the sources: git is not installed"]


def test_the_state_of_the_users_repository_is_recorded(project: Project) -> None:
    project.write(two="import diffract_dask.runs as dm\n" + TWO_STAGES)
    for command in (["init", "-q"], ["add", "two.py"], ["commit", "-q", "-m", "x"]):
        snapshots.git(project.folder, *command)
    head = snapshots.git(project.folder, "rev-parse", "HEAD").strip()
    record = project.load("two").PIPELINE.run("base", project.runs)
    assert (record.git_rev, record.git_dirty) == (head, False)
    changed = project.declare("two", TWO_STAGES.replace("* 10", "* 11")).PIPELINE.run("base", project.runs)
    assert (changed.git_rev, changed.git_dirty) == (head, True)
    assert len(snapshots.git(project.folder / "runs/_scripts", "log", "--format=%H").split()) == 2


def test_sources_that_did_not_change_make_no_commit(project: Project) -> None:
    pipeline = project.declare("two", TWO_STAGES + "dm.register('other', base='base', a=5)\n").PIPELINE
    commits = {pipeline.run(name, project.runs).snapshot for name in ("base", "other")}
    assert len(commits) == 1


def test_an_object_that_cannot_be_hashed_asks_for_a_version(project: Project) -> None:
    body = "import threading\nlock = threading.Lock()\ndef f(ctx): lock.acquire(); lock.release()\ndm.register('v')\n"
    pipeline = project.declare("p", body + "PIPELINE = dm.Pipeline('p', [dm.Stage('s', f)])\n").PIPELINE
    with pytest.raises(DeclarationError, match=r"Stage\('s', …, version=1\)"):
        pipeline.run("v", project.runs)
    fixed = project.declare("p", body + "PIPELINE = dm.Pipeline('p', [dm.Stage('s', f, version=(1, 'a'))])\n").PIPELINE
    assert fixed.run("v", project.runs).code == {"s": 'version:[1,"a"]'}


def test_a_pipeline_that_cannot_run_stops_no_other_of_its_module(project: Project) -> None:
    source = """
import threading
lock = threading.Lock()
dm.register('v')
def bad(ctx): lock.acquire()
def good(ctx): pass
dm.Pipeline('bad', [dm.Stage('s', bad)])
PIPELINE = dm.Pipeline('good', [dm.Stage('s', good)])
CHAIN = dm.Chain('c', [dm.ChainStep('s', PIPELINE)])
CHAIN.variation('x', s='v')
"""
    record = project.declare("p", source).CHAIN.variations["x"].run(project.runs)["s"]
    assert record.status == "done"
    assert set(project.catalog.pipelines) == set(dm.Catalog(project.runs).pipelines) == {"good", "bad"}
    assert dm.progress(project.catalog, "c", "x").status == "done"


# ---------------------------------------------------------------- artifacts


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("how", ["copy", "link", "move"])
def test_artifacts_are_copied_linked_or_moved(project: Project, how: str, kind: str) -> None:
    made = project.folder / "made"
    if kind == "folder":
        (made / "deep").mkdir(parents=True)
        (made / "deep" / "x.txt").write_text("data")
    else:
        made.write_text("data")
    record = in_a_stage(project, f"ctx.artifact('s', 'kept/it', 'made', how={how!r})")
    kept = Path(record.fdir) / "stages/s/outputs/kept/it"
    inner = kept / "deep/x.txt" if kind == "folder" else kept
    assert inner.read_text() == "data"
    assert kept.is_symlink() == (how == "link")
    assert made.exists() == (how != "move")
    (output,) = project.runs.outputs(record, "s")
    assert (output.relpath, output.link, output.size) == (
        "kept/it/deep/x.txt" if kind == "folder" else "kept/it",
        how == "link",
        4,
    )
    assert not list(Path(record.fdir).rglob("*.partial"))


def test_an_artifact_takes_the_place_of_another(project: Project) -> None:
    record = in_a_stage(
        project,
        """
pathlib.Path('d').mkdir(); pathlib.Path('d/x').write_text('1'); pathlib.Path('f').write_text('2')
for name in ('f', 'd', 'f', 'd', 'd', 'f'):
    ctx.artifact('s', 'a', name)
    ctx.artifact('s', 'b', name, how='link')
""",
    )
    assert [(item.relpath, item.size) for item in project.runs.outputs(record, "s")] == [("a", 1), ("b", 1)]
    assert (project.folder / "d/x").read_text() == "1", "replacing a link leaves what it leads to"


WRONG_ARTIFACTS = {
    "up": ("ctx.artifact('s', '../../x', 'f')", ArtifactError, "not a path inside"),
    "absolute": ("ctx.artifact('s', os.path.abspath('x'), 'f')", ArtifactError, "not a path inside"),
    "empty": ("ctx.artifact('s', '', 'f')", ArtifactError, "not a path inside"),
    "missing": ("ctx.artifact('s', 'x', 'g')", ArtifactNotFoundError, "does not exist"),
    "how": ("ctx.artifact('s', 'x', 'f', how='steal')", ArtifactError, "copy, link, move"),
    "stage": ("ctx.artifact('ss', 'x', 'f')", UnknownNameError, "Did you mean 's'"),
    "other stage": ("ctx.artifact('t', 'x', 'f')", ArtifactError, "stage 's' is the one that runs"),
    "contains": ("ctx.artifact('s', 'x', ctx.stage_dir())", ArtifactError, "contain each other"),
    "through a link": (
        "pathlib.Path('d').mkdir(); ctx.artifact('s', 'l', 'd', how='link'); ctx.artifact('s', 'l/x', 'f')",
        ArtifactError,
        "leads out of the run",
    ),
    "a stage that is no input": ("ctx.stage_dir('t')", UnknownNameError, r"Add it: Stage\('s', …, inputs="),
    "metric of another stage": ("ctx.metric('t', 'x', 1)", ArtifactError, "stage 's' is the one that runs"),
    "array": ("ctx.metric('s', 'x', np.arange(3))", ArtifactError, "not ndarray"),
    "none": ("ctx.metric('s', 'x', None)", ArtifactError, "not NoneType"),
    "direction": ("ctx.metric('s', 'x', 1, direction='up')", ArtifactError, "'lower' or 'higher'"),
    "name": ("ctx.metric('s', '', 1)", RunError, "printable text"),
    "step": ("ctx.upstream_artifact('x')", UnknownNameError, "no upstream step 'x'"),
}


@pytest.mark.parametrize("what", WRONG_ARTIFACTS)
def test_what_a_stage_must_not_do(project: Project, what: str) -> None:
    body, error, message = WRONG_ARTIFACTS[what]
    (project.folder / "f").write_text("data")
    with pytest.raises(error, match=message):
        in_a_stage(project, body)
    assert (project.folder / "f").read_text() == "data"
    assert not (project.folder / "x").exists()


def test_metrics_keep_type_units_and_direction(project: Project) -> None:
    record = in_a_stage(
        project,
        """
ctx.metric('s', 'loss', np.float32(0.5), units='nat', direction='lower')
ctx.metric('s', 'steps', np.int64(3))
ctx.metric('s', 'good', np.bool_(True))
ctx.metric('s', 'zero_d', np.array(2.5))
ctx.metric('s', 'algo', 'ePIE')
""",
    )
    assert project.runs.metrics(record, "s")["s"] == {
        "loss": dm.Metric(0.5, "nat", "lower"),
        "steps": dm.Metric(3),
        "good": dm.Metric(True),
        "zero_d": dm.Metric(2.5),
        "algo": dm.Metric("ePIE"),
    }


def test_sixty_threads_lose_no_metric(project: Project) -> None:
    body = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(60) as pool:
    list(pool.map(lambda i: ctx.metric('s', f'm{i}', i), range(60)))
"""
    record = in_a_stage(project, body)
    assert {name: metric.value for name, metric in project.runs.metrics(record)["s"].items()} == {
        f"m{i}": i for i in range(60)
    }


def test_eight_processes_lose_no_metric(project: Project) -> None:
    source = """
import multiprocessing
import diffract_dask.runs as dm
dm.register('v', a=1)
def write(job):
    ctx, start = job
    for i in range(start, start + 10):
        ctx.metric('s', f'm{i}', i)
def f(ctx):
    with multiprocessing.get_context('spawn').Pool(8) as pool:
        pool.map(write, [(ctx, start) for start in range(0, 80, 10)])
PIPELINE = dm.Pipeline('p', [dm.Stage('s', f)])
if __name__ == '__main__':
    PIPELINE.run('v', dm.RunRegistry('runs'))
"""
    project.write(p=source)
    project.python("p.py")
    (record,) = project.runs.list_runs()
    assert {name: metric.value for name, metric in project.runs.metrics(record)["s"].items()} == {
        f"m{i}": i for i in range(80)
    }


def test_a_context_reads_upstream_and_logs(project: Project) -> None:
    record = in_a_stage(project, "ctx.log('hello'); assert ctx.fdir == str(ctx.path); assert ctx.config.a == 1")
    assert "s: hello\n" in (Path(record.fdir) / "run.log").read_text()


# ---------------------------------------------------------------- who works on a run


def test_a_run_at_work_fails_by_name_or_waits(project: Project) -> None:
    source = """
import threading
started, go = threading.Event(), threading.Event()
def wait(): started.set(); go.wait(20)
dm.register('v')
def f(ctx): wait()
PIPELINE = dm.Pipeline('p', [dm.Stage('s', f, version=1)])
"""
    module = project.declare("p", source)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(module.PIPELINE.run, "v", project.runs)
        module.started.wait(20)
        impatient = dm.RunRegistry(project.folder / "runs", wait=0)
        with pytest.raises(RunLockedError, match=rf"at work in process {os.getpid()} on .*raise RunRegistry\(wait"):
            module.PIPELINE.run("v", impatient)
        (record,) = project.runs.list_runs()
        assert record.status == "running"
        second = pool.submit(module.PIPELINE.run, "v", project.runs)
        module.go.set()
        assert first.result().stage_status == {"s": "done"}
        assert second.result().stage_status == {"s": "cached"}
    assert not list((project.folder / "runs").rglob(leases.LEASE))


def test_a_folder_that_cannot_be_written_is_said(project: Project) -> None:
    (project.folder / "runs").write_text("a file")
    with pytest.raises(RunError, match=r"cannot be written .*; give another root"):
        in_a_stage(project, "pass")
    project.write_all(PTYCHO_PROJECT)
    with pytest.raises(RunError, match=r"cannot be written .*; give another root"):
        project.load("chains.ptycho").CHAIN.variations["baseline"].run(project.runs)


def test_an_upstream_may_come_by_another_way_to_the_same_root(project: Project) -> None:
    upstream = project.declare("two", TWO_STAGES).PIPELINE.run("base", project.runs)
    (project.folder / "way").symlink_to(project.folder / "runs")
    other = project.declare("p", ONE_STAGE.format(body="ctx.upstream_artifact('u', 'stages/first/outputs/x.txt')"))
    runs = dm.RunRegistry(project.folder / "way")
    assert other.PIPELINE.run("v", runs, upstream={"u": upstream}, only="s").stage_status["s"] == "done"


def test_a_stage_cannot_run_its_own_run(project: Project) -> None:
    with pytest.raises(RunLockedError, match="in this very thread"):
        in_a_stage(project, "import p; p.PIPELINE.run('v', dm.RunRegistry(ctx.root), only='s')")


KILLED = """
import os, signal, sys
import diffract_dask.runs as dm
dm.register('v')
def f(ctx):
    (ctx.stage_dir('s') / 'outputs' / 'x').write_text('half')
    if os.path.exists('kill'):
        os.kill(os.getpid(), signal.SIGKILL)
PIPELINE = dm.Pipeline('p', [dm.Stage('s', f)])
if __name__ == '__main__':
    PIPELINE.run('v', dm.RunRegistry('runs'))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL on this system")
def test_c8_a_killed_run_shows_as_interrupted_and_can_be_run_again(project: Project) -> None:
    project.write(p=KILLED)
    (project.folder / "kill").touch()
    assert project.python("p.py", check=False).returncode == -9
    (record,) = project.runs.list_runs()
    assert (record.status, record.stage_status, record.ended) == ("interrupted", {"s": "interrupted"}, None)
    (project.folder / "kill").unlink()
    project.python("p.py")
    (record,) = project.runs.list_runs()
    assert (record.status, record.stage_status) == ("done", {"s": "done"})


def test_a_run_killed_between_two_stages_shows_as_interrupted(project: Project) -> None:
    record = project.declare("two", TWO_STAGES).PIPELINE.run("base", project.runs, only="first")
    path = Path(record.fdir)
    data = encoding.read_json(path / "run.json")
    encoding.write_json(path / "run.json", {**data, "ended": None, "stage_status": {"first": "done"}})
    encoding.write_json(path / leases.LEASE, leases.myself())
    assert project.runs.list_runs()[0].status == "running"
    (path / leases.LEASE).unlink()
    (found,) = project.runs.list_runs(status="interrupted")
    assert found.stage_status == {"first": "done"}


def test_the_heartbeat_tells_of_processes_elsewhere(tmp_path: Path) -> None:
    lease = tmp_path / leases.LEASE
    encoding.write_json(lease, {"host": "elsewhere", "pid": 1, "space": "x"})
    assert leases.is_held(tmp_path)
    os.utime(lease, (1, 1))
    assert not leases.is_held(tmp_path)
    encoding.write_json(lease, {**leases.myself(), "born": "0"})
    assert not leases.is_held(tmp_path), "the number belongs to another process now"
    encoding.write_json(lease, leases.myself())
    assert leases.is_held(tmp_path)


def test_the_lease_beats_while_a_run_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_BEAT_SECONDS", 0.01)
    with leases.hold(tmp_path, None):
        os.utime(tmp_path / leases.LEASE, (1, 1))
        for _ in range(200):
            if (tmp_path / leases.LEASE).stat().st_mtime > 1:
                break
            threading.Event().wait(0.02)
        assert (tmp_path / leases.LEASE).stat().st_mtime > 1
    assert not (tmp_path / leases.LEASE).exists()


# ---------------------------------------------------------------- names and folders


@pytest.mark.parametrize("name", ["a/b", "..", ".", "_scripts", "x" * 300, "é ü", "con", "a.", " a", "%41", "A:b|c?*"])
def test_any_name_has_a_folder_and_is_found(project: Project, name: str) -> None:
    pipeline = project.declare(
        "p",
        f"dm.register({name!r})\ndef f(ctx): ctx.metric({name!r}, 'm', 1)\n"
        f"PIPELINE = dm.Pipeline({name!r}, [dm.Stage({name!r}, f)])\n",
    ).PIPELINE
    record = pipeline.run(name, project.runs)
    (found,) = project.runs.list_runs(name, name)
    assert found.fingerprint == record.fingerprint
    assert Path(found.fdir).parent.parent.parent == project.runs.root
    assert project.runs.metrics(found)[name]["m"].value == 1
    assert len(folder(name)) <= 120


def test_folders_of_different_names_differ() -> None:
    names = ["a", "A/", "a/b", "a%2Fb", "x" * 300, "x" * 301, ".a", "%2Ea", "_a", "%5Fa", "é", "%C3%A9"]
    assert len({folder(name) for name in names}) == len(names)


def test_short_fingerprints_that_collide_have_folders_of_their_own(project: Project) -> None:
    pipeline = project.declare("two", TWO_STAGES).PIPELINE
    record = pipeline.run("base", project.runs)
    document = Path(record.fdir) / "run.json"
    other = "f" * 64 if not record.fingerprint.startswith("f") else "e" * 64
    document.write_text(
        document.read_text().replace(
            f'"fingerprint": "{record.fingerprint}"', f'"fingerprint": "{record.short_fp}{other[12:]}"', 1
        )
    )
    again = pipeline.run("base", project.runs)
    assert Path(again.fdir).name == again.fingerprint
    assert len(project.runs.list_runs()) == 2


def test_a_root_may_be_read_only_for_readers(project: Project) -> None:
    record = project.declare("two", TWO_STAGES).PIPELINE.run("base", project.runs)
    shutil.copytree(project.folder / "runs", project.folder / "other")
    for path in [project.folder / "other", *(project.folder / "other").rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    runs = dm.RunRegistry(project.folder / "other")
    assert [run.fingerprint for run in runs.list_runs()] == [record.fingerprint]
    for path in [project.folder / "other", *(project.folder / "other").rglob("*")]:
        path.chmod(0o755)
    assert np.isfinite(runs.outputs(runs.list_runs()[0])[0].size)
