"""Questions about pipelines, chains and runs, and finding the modules that declare them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from projects import MYSIM, MYSIM_V2, PTYCHO_PROJECT, Project

import diffract_dask.runs as dm
from diffract_dask.errors import RunError, UnknownNameError

PIPE_A = """
import diffract_dask.runs as dm
dm.register('base', scan=dict(step=1, width=2), notes=None)
dm.register('jitter', base='base', probe=dict(amp=0.1))
dm.register('only_a', base='base', x=1)
def f(ctx): ctx.metric('s', 'm', 1)
def g(ctx): pass
PIPELINE = dm.Pipeline('pipe_a', [dm.Stage('s', f), dm.Stage('t', g)])
"""
PIPE_B = """
import diffract_dask.runs as dm
dm.register('base', scan=dict(step=1, width=2), notes=None)
dm.register('jitter_renamed', base='base', forks_of='jitter', probe=dict(amp=0.5), notes=dm.UNSET)
dm.register('typo', base='base', forks_of='jiter')
dm.register('extra', base='jitter_renamed', scan=dict(step=1.0))
def f(ctx): ctx.metric('s', 'm', 2)
PIPELINE = dm.Pipeline('pipe_b', [dm.Stage('s', f)], parent='pipe_a')
"""
FORKS = {"pipe_a": PIPE_A, "pipe_b": PIPE_B}


@pytest.fixture
def forks(project: Project) -> Project:
    project.write_all(FORKS)
    assert dm.scan_import(project.folder, project.runs.root) == {"pipe_a": None, "pipe_b": None}
    return project


def test_the_forest_has_orphans_and_circles(project: Project) -> None:
    declared = [
        ("a", None),
        ("b", "a"),
        ("c", "b"),
        ("lost", "nowhere"),
        ("x", "y"),
        ("y", "x"),
        ("z", "x"),
        ("me", "me"),
    ]
    lines = ["def f(ctx): pass", "stages = [dm.Stage('s', f)]"]
    lines += [f"dm.Pipeline({name!r}, stages, parent={parent!r})" for name, parent in declared]
    lines += ["p = dm.Pipeline('zz', stages)"]
    lines += [f"dm.Chain({name!r}, [dm.ChainStep('s', p)], parent={parent!r})" for name, parent in declared]
    project.write(many="import diffract_dask.runs as dm\n" + "\n".join(lines))
    dm.scan_import(project.folder, project.runs.root)
    forest = dm.forest(project.catalog)

    def shape(nodes: list[dm.forks.Node]) -> list[object]:  # type: ignore[name-defined]
        return [(node.name, node.orphan, node.cycle, shape(node.children)) for node in nodes]

    expected = [
        ("a", False, False, [("b", False, False, [("c", False, False, [])])]),
        ("lost", True, False, []),
        ("me", False, True, []),
        ("x", False, True, [("z", False, False, [])]),
        ("y", False, True, []),
    ]
    assert shape(forest.chains) == expected
    assert shape(forest.pipelines) == [*expected, ("zz", False, False, [])]


def test_pipelines_that_only_have_runs_are_in_the_forest(project: Project) -> None:
    project.write(mysim=MYSIM, mysim_v2=MYSIM_V2)
    project.load("mysim_v2").PIPELINE.run("jitter", project.runs)
    for path in (project.folder / "runs/_manifests").iterdir():
        path.unlink()
    (node,) = dm.forest(dm.Catalog(project.runs, live=False)).pipelines
    assert (node.name, node.parent, node.orphan, node.runs) == ("mysim_v2", "mysim", True, 1)


def test_what_a_variant_adds_to_its_base(forks: Project) -> None:
    found = dm.overrides(forks.catalog, "pipe_b", "extra")
    assert found.base == "jitter_renamed"
    assert found.overrides == {"scan": {"step": 1.0}}
    (entry,) = found.entries
    assert (entry.path, entry.kind, entry.parent, entry.child) == ("scan.step", "changed", 1, 1.0)
    renamed = dm.overrides(forks.catalog, "pipe_b", "jitter_renamed")
    assert renamed.overrides["notes"] == {"$unset": True}
    assert {(entry.path, entry.kind) for entry in renamed.entries} == {("probe", "added"), ("notes", "removed")}
    assert {entry.kind for entry in dm.overrides(forks.catalog, "pipe_a", "base").entries} == {"added"}
    with pytest.raises(UnknownNameError, match="Did you mean 'extra'"):
        dm.overrides(forks.catalog, "pipe_b", "extre")


def test_a_fork_against_its_parent_variant_by_variant(forks: Project) -> None:
    found = dm.variant_diff(forks.catalog, "pipe_b")
    kinds = {match.variant: (match.kind, match.parent_variant, match.by) for match in found.variants}
    assert kinds == {
        "base": ("matches", "base", "name"),
        "jitter_renamed": ("differs", "jitter", "forks_of"),
        "typo": ("only_in_child", None, None),
        "extra": ("only_in_child", None, None),
        "only_a": ("only_in_parent", "only_a", None),
    }
    table = {match.variant: match for match in found.variants}
    assert table["typo"].forks_of_unresolved == "jiter"
    assert [(entry.path, entry.kind, entry.parent, entry.child) for entry in table["jitter_renamed"].entries] == [
        ("notes", "removed", None, None),
        ("probe.amp", "changed", 0.1, 0.5),
    ]
    assert [(stage.stage, stage.kind, stage.changed) for stage in found.stages] == [
        ("s", "changed", ["code"]),
        ("t", "removed", []),
    ]
    root = dm.variant_diff(forks.catalog, "pipe_a")
    assert {match.kind for match in root.variants} == {"no_parent"}


def test_an_orphan_is_answered_and_marked(project: Project) -> None:
    project.write(pipe_b=PIPE_B)
    dm.scan_import(project.folder, project.runs.root)
    found = dm.variant_diff(project.catalog, "pipe_b")
    assert found.orphan
    assert {match.kind for match in found.variants} == {"only_in_child"}
    assert dm.source_diff(project.catalog, "pipe_b").orphan


def test_the_sources_of_a_fork_against_its_parents(forks: Project) -> None:
    found = dm.source_diff(forks.catalog, "pipe_b")
    assert "--- pipe_a.py\n+++ pipe_b.py\n" in found.diff
    assert "+PIPELINE = dm.Pipeline('pipe_b', [dm.Stage('s', f)], parent='pipe_a')\n" in found.diff
    assert str(forks.folder) not in found.diff
    assert dm.source_diff(forks.catalog, "pipe_a").diff == ""
    import shutil

    shutil.rmtree(forks.folder / "runs/_scripts")
    assert dm.source_diff(forks.catalog, "pipe_b").diff == found.diff, "else as the files are now"
    for name in FORKS:
        (forks.folder / f"{name}.py").unlink()
    assert dm.source_diff(forks.catalog, "pipe_b").missing == ["pipe_a", "pipe_b"]


def test_configurations_side_by_side(forks: Project) -> None:
    found = dm.compare(forks.catalog, ["pipe_a", "pipe_b"], "jitter")
    assert [(column.label, column.variant) for column in found.columns] == [
        ("pipe_a", "jitter"),
        ("pipe_b", "jitter_renamed"),
    ]
    rows = {row.path: row for row in found.rows}
    assert (rows["notes"].present, rows["notes"].values, rows["notes"].equal) == ([True, False], [None, None], False)
    assert rows["scan.step"].equal
    missing = dm.compare(forks.catalog, ["pipe_a", "pipe_b"], "only_a")
    assert [column.present for column in missing.columns] == [True, False]
    assert not any(row.equal for row in missing.rows)
    typed = dm.compare(forks.catalog, ["pipe_a", "pipe_b"], ["base", "extra"])
    assert not next(row for row in typed.rows if row.path == "scan.step").equal, "1 and 1.0 differ"
    for pipelines, variants in ((["pipe_a"], "base"), (["pipe_a", "pipe_b"], ["base"])):
        with pytest.raises(RunError):
            dm.compare(forks.catalog, pipelines, variants)


CHAINS = """
import diffract_dask.runs as dm
dm.register('one', a=1)
dm.register('same', a=1)
dm.register('two', a=2)
def f(ctx): ctx.metric('s', 'm', ctx.config.a, units='nm', direction='lower')
def g(ctx): ctx.metric('s', 'flag', True)
P, Q, R = (dm.Pipeline(name, [dm.Stage('s', fn)]) for name, fn in (('p', f), ('q', f), ('r', g)))
OLD = dm.Chain('old', [dm.ChainStep('p', P), dm.ChainStep('q', Q, 'p')])
OLD.variation('base', p='one', q='one')
OLD.variation('jitter', base='base', q='two')
OLD.variation('gone', base='base')
NEW = dm.Chain('new', [dm.ChainStep('p', P), dm.ChainStep('q', Q, 'p'), dm.ChainStep('r', R)], parent='old')
NEW.variation('base', p='one', q='one', r='one')
NEW.variation('shaken', base='base', forks_of='jitter', q='one', p='same')
NEW.variation('lost', base='base', forks_of='jiter')
NEW.variation('loop_a', base='loop_b')
NEW.variation('loop_b', base='loop_a')
NEW.variation('no_base', base='nothing', p='two')
"""


@pytest.fixture
def chained(project: Project) -> Project:
    project.write(chained=CHAINS)
    module = project.load("chained")
    for name in ("base", "shaken"):
        module.NEW.variations[name].run(project.runs)
    return project


def test_a_chain_against_its_parent(chained: Project) -> None:
    found = dm.chain_diff(chained.catalog, "new")
    assert [(step.step, step.kind, step.child) for step in found.steps] == [("r", "added", "r")]
    table = {item.variation: item for item in found.variations}
    assert {name: item.kind for name, item in table.items()} == {
        "base": "differs",
        "shaken": "differs",
        "lost": "only_in_child",
        "loop_a": "unresolved",
        "loop_b": "unresolved",
        "no_base": "unresolved",
        "gone": "only_in_parent",
    }
    assert table["lost"].forks_of_unresolved == "jiter"
    assert "circle" in str(table["loop_a"].error)
    assert "'nothing'" in str(table["no_base"].error)
    steps = {step.step: (step.kind, step.parent, step.child) for step in table["shaken"].steps}
    assert steps == {
        "p": ("renamed", "one", "same"),
        "q": ("differs", "two", "one"),
        "r": ("added", None, "one"),
    }


def test_variations_side_by_side_step_by_step(chained: Project) -> None:
    found = dm.variation_diff(chained.catalog, "new", ["base", "shaken", "no_base"])
    first, second = found.steps[:2]
    assert [(column.variant, column.present) for column in first.columns] == [
        ("one", True),
        ("same", True),
        ("two", True),
    ]
    assert [(row.values, row.equal) for row in first.rows] == [([1, 1, 2], False)]
    assert second.columns[2].error
    with pytest.raises(RunError, match="two variations or more"):
        dm.variation_diff(chained.catalog, "new", ["base"])


def test_variations_in_a_circle_or_without_base_do_not_stop_the_rest(chained: Project) -> None:
    board = dm.scoreboard(chained.catalog, "new", "base")
    rows = {row.variation: row for row in board.rows}
    assert rows["base"].status == "done"
    assert "circle" in str(rows["loop_a"].error)
    assert dm.progress(chained.catalog, "new", "loop_a").status == "unspecified"
    assert dm.progress(chained.catalog, "new", "lost").status == "done", "the same variants as base"


def test_the_scoreboard_knows_units_directions_and_what_is_better(chained: Project) -> None:
    module = sys.modules["chained"]
    module.OLD.variations["base"].run(chained.runs)
    module.OLD.variations["jitter"].run(chained.runs)
    board = dm.scoreboard(chained.catalog, "old", "base")
    assert [(column.key, column.units, column.direction) for column in board.metrics] == [
        ("p.s.m", "nm", "lower"),
        ("q.s.m", "nm", "lower"),
    ]
    jitter = board.rows[1]
    assert jitter.deltas == {"p.s.m": 0, "q.s.m": 1}
    assert jitter.better == {"p.s.m": None, "q.s.m": False}
    new = dm.scoreboard(chained.catalog, "new", "base")
    assert "r.s.flag" not in new.rows[0].deltas, "truth values are no numbers"
    with pytest.raises(UnknownNameError, match="Did you mean 'base'"):
        dm.scoreboard(chained.catalog, "new", "bas")


def test_progress_of_what_has_not_run(chained: Project) -> None:
    found = dm.progress(chained.catalog, "old", "jitter")
    assert [step.status for step in found.steps] == ["done", "pending"]
    assert found.status == "pending"
    assert found.steps[1].fingerprint is not None


def test_progress_shows_failures_with_their_traceback(project: Project) -> None:
    source = CHAINS.replace("def g(ctx): ctx.metric('s', 'flag', True)", "def g(ctx): raise ValueError('boom')")
    project.write(chained=source)
    with pytest.raises(ValueError, match="boom"):
        project.load("chained").NEW.variations["base"].run(project.runs)
    found = dm.progress(project.catalog, "new", "base")
    assert [step.status for step in found.steps] == ["done", "done", "failed"]
    assert found.status == "failed"
    assert "ValueError: boom" in found.steps[2].errors["s"]


def test_siblings_share_a_step(chained: Project) -> None:
    catalog = chained.catalog
    (record,) = catalog.runs.list_runs("p", "one")
    found = {item.variation: item for item in dm.siblings(catalog, record)}
    assert found.keys() == {"shaken", "lost", "loop_a", "loop_b", "no_base"}
    assert (found["shaken"].variant, found["shaken"].same) == ("same", False)
    assert found["shaken"].run == catalog.runs.list_runs("p", "same")[0].where
    assert found["lost"].same
    for path in (chained.folder / "runs/_manifests").iterdir():
        path.unlink()
    (only,) = dm.siblings(dm.Catalog(chained.runs, live=False), record)
    assert only.variation == "shaken"


QUERIES = {
    "ePIE": {("variant", "recon/ePIE"), ("run", "recon/ePIE")},
    "jitter_l": {
        ("variant", "forward_sim/jitter_low"),
        ("variation", "ptycho/jitter_low"),
        ("run", "forward_sim/jitter_low"),
    },
    "amp>=0.1": {
        ("variant", "forward_sim/jitter_low"),
        ("variant", "forward_sim/jitter_high"),
        ("run", "forward_sim/jitter_low"),
        ("run", "forward_sim/jitter_high"),
    },
    "algo = DM": {("variant", "recon/DM"), ("run", "recon/DM")},
    "gain=3": {("variant", "recon/DM"), ("run", "recon/DM")},
    "algo>3": set(),
    "nothing=3": set(),
}


def test_finding_by_name_value_and_fingerprint(project: Project) -> None:
    project.write_all(PTYCHO_PROJECT)
    project.python("run_ablation.py")
    catalog = project.catalog
    for query, expected in QUERIES.items():
        assert {(item.kind, item.name) for item in dm.find(catalog, query)} == expected, query
    variant = catalog.variant("recon", "DM")
    found = dm.find(catalog, f" {variant.fingerprint[:8].upper()} ")
    assert {(item.kind, item.name) for item in found} == {("variant", "recon/DM"), ("run", "recon/DM")}
    (run,) = [item for item in found if item.kind == "run"]
    assert dm.find(catalog, str(run.fingerprint)[:12])[0].run == run.run
    with pytest.raises(RunError, match="a query is"):
        dm.find(catalog, "  ")


def test_why_goes_across_variants_and_pipelines(forks: Project) -> None:
    runs = forks.runs
    a, b = (forks.load(name).PIPELINE.run("base", runs) for name in FORKS)
    c = sys.modules["pipe_b"].PIPELINE.run("extra", runs)
    across = dm.why(runs, a.where, b.where)
    assert across.reasons == ["pipeline", "code", "stages"]
    assert [(stage.stage, stage.kind) for stage in across.stages] == [("s", "differs"), ("t", "only_in_a")]
    (source,) = across.sources
    assert "-PIPELINE = dm.Pipeline('pipe_a'" in source.diff
    variants = dm.why(runs, b, c)
    assert variants.reasons == ["variant", "config"]
    assert [entry.path for entry in variants.entries] == ["scan.step", "notes", "probe"]
    assert dm.why(runs, b, b).same
    assert dm.why(runs, b, b).reasons == []


def test_every_answer_is_strict_json(chained: Project) -> None:
    catalog = chained.catalog
    answers = [dm.chain_diff(catalog, "new"), dm.scoreboard(catalog, "new"), dm.progress(catalog, "new", "lost")]
    answers += [dm.variation_diff(catalog, "new", ["base", "loop_a"]), dm.forest(catalog), catalog.runs.list_runs()]
    text = json.dumps(dm.as_json(answers), allow_nan=False)
    assert str(chained.folder) not in text.replace(str(chained.folder) + "/.pytest", "")


# ---------------------------------------------------------------- discovery


def test_a_scan_reads_what_is_written_plainly(project: Project) -> None:
    project.write_all({**PTYCHO_PROJECT, "mysim": MYSIM, "mysim_v2": MYSIM_V2})
    project.write(
        other="from diffract_dask.runs import Pipeline as P, register\nregister('x')\nP('named', [], parent='mysim')\n",
        comment="# diffract_dask.runs PIPELINE CHAIN Pipeline\n",
        broken="import diffract_dask.runs as dm\ndm.Pipeline(\n",
        package____init__="",
        package__inner="import diffract_dask.runs\nX = diffract_dask.runs.Pipeline('inner', [])\n",
        runs___scripts__old="import diffract_dask.runs as dm\ndm.Pipeline('old', [])\n",
        _private__x="import diffract_dask.runs as dm\ndm.Pipeline('x', [])\n",
        now="import diffract_dask.runs as dm\nP = dm.Pipeline('now', [])\nP.run('v', dm.RunRegistry('runs'))\n",
    )
    found = {item.module: item for item in dm.discover(project.folder)}
    assert found.keys() == {
        *("forward_sim", "ptyd_convert", "recon", "analysis", "chains.ptycho", "mysim", "mysim_v2"),
        *("other", "broken", "package.inner", "now"),
    }
    assert found["mysim_v2"].pipelines == {"mysim_v2": "mysim"}
    assert found["mysim_v2"].variants == ["base", "jitter", "hires"]
    assert found["chains.ptycho"].chains == {"ptycho": None}
    assert (found["other"].pipelines, found["other"].variants) == ({"named": "mysim"}, ["x"])
    assert "SyntaxError" in str(found["broken"].error)
    assert {name for name, item in found.items() if item.runs_at_import} == {"now"}


def test_importing_scans_keep_errors_per_module_and_run_nothing(project: Project) -> None:
    project.write_all(FORKS)
    project.write(
        broken="import diffract_dask.runs as dm\ndm.Pipeline('broken', [])\n",
        raises="import diffract_dask.runs as dm\ndm.register('v')\nraise ValueError('boom at import')\n",
        slow="import diffract_dask.runs as dm, time\ndm.register('v')\ntime.sleep(60)\n",
        leaves="import diffract_dask.runs as dm, sys\ndm.register('v')\nsys.exit(3)\n",
        now="import diffract_dask.runs as dm\nP = dm.Pipeline('now', [])\nP.run('v', dm.RunRegistry('runs'))\n",
    )
    answer = dm.scan_import(project.folder, project.runs.root, timeout=8)
    assert {name for name, error in answer.items() if error is None} == set(FORKS)
    for name, said in {
        "broken": "no stages",
        "raises": "boom at import",
        "slow": "more than 8 s",
        "leaves": "ended with 3",
        "now": "if __name__ == '__main__'",
    }.items():
        assert said in str(answer[name]), name
    catalog = project.catalog
    assert {item.module for item in catalog.errors} == set(answer) - set(FORKS)
    assert not (project.folder / "runs/now").exists()
    assert not set(answer) & set(sys.modules)
    with pytest.raises(UnknownNameError, match="Did you mean 'pipe_a'"):
        catalog.pipeline("pipe_aa")


def test_an_error_keeps_what_was_known_before(forks: Project) -> None:
    forks.write(pipe_a=PIPE_A + "\nraise ValueError('later')\n")
    dm.scan_import(forks.folder, forks.runs.root)
    catalog = forks.catalog
    assert "later" in str(catalog.pipeline("pipe_a").error)
    assert set(catalog.pipeline("pipe_a").variants) == {"base", "jitter", "only_a"}
    forks.write(pipe_a=PIPE_A)
    dm.scan_import(forks.folder, forks.runs.root)
    assert forks.catalog.errors == []


def test_what_is_known_is_marked_when_a_source_or_a_helper_is_newer(project: Project) -> None:
    project.write(tools="def helper(): return 1\n", pipe_a=PIPE_A.replace("'m', 1", "'m', tools.helper()"))
    project.write(pipe_a="import tools\n" + (project.folder / "pipe_a.py").read_text())
    project.load("pipe_a").PIPELINE.run("base", project.runs)
    assert not project.catalog.pipeline("pipe_a").outdated
    project.write(tools="def helper(): return 2\n")
    assert project.catalog.pipeline("pipe_a").outdated
    dm.scan_import(project.folder, project.runs.root)
    assert not project.catalog.pipeline("pipe_a").outdated


def test_a_moved_module_is_found_where_it_is_now(forks: Project) -> None:
    (forks.folder / "deep").mkdir()
    (forks.folder / "pipe_b.py").rename(forks.folder / "deep/pipe_b.py")
    assert {item.module for item in dm.discover(forks.folder)} == {"pipe_a", "deep.pipe_b"}


def test_modules_load_by_name_and_siblings_import_each_other(project: Project) -> None:
    project.write_all(PTYCHO_PROJECT)
    sys.path.remove(str(project.folder))
    try:
        module = dm.load_module("chains.ptycho", project.folder)
        assert module.CHAIN.name == "ptycho"
        assert dm.load_module("chains.ptycho", project.folder) is module
        with pytest.raises(UnknownNameError, match=r"Did you mean 'chains\.ptycho'"):
            dm.load_module("chains.ptych", project.folder)
        assert str(project.folder) not in sys.path
    finally:
        sys.path.insert(0, str(project.folder))


def test_a_catalog_without_runs_says_what_to_do(tmp_path: Path) -> None:
    catalog = dm.Catalog(tmp_path / "none", live=False)
    with pytest.raises(UnknownNameError, match="run one, or import them once with scan --import"):
        catalog.chain("x")
    assert dm.forest(catalog).pipelines == []
    assert not (tmp_path / "none").exists(), "reading makes nothing"
