"""What diffman 0.3.0 gets wrong, done right: its ten worst findings (f1 to f10) and the weaknesses C1 to C11."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from projects import MYSIM, MYSIM_V2, PTYCHO_PROJECT, Project

import diffract_dask.runs as dm
from diffract_dask.errors import FrozenConfigError, RunError, UnencodableError, UnknownNameError

TWO_STAGES = """
from pathlib import Path

dm.register('base', a=1, b=2)

def scale(value):
    return value * 10

def _first(ctx):
    calls('first')
    ctx.artifact('first', 'x.txt').write_text(str(scale(ctx.config.a)))

def _second(ctx):
    calls('second')
    text = (ctx.stage_dir('first') / 'outputs/x.txt').read_text()
    ctx.artifact('second', 'y.txt').write_text(text + '!')
    ctx.metric('second', 'length', len(text))

def calls(name):
    with open('calls', 'a') as file:
        file.write(name + ' ')

PIPELINE = dm.Pipeline('two', [
    dm.Stage('first', _first, config_keys='a'),
    dm.Stage('second', _second, inputs='first', config_keys='b'),
])
"""


def calls(project: Project) -> list[str]:
    """Return which stages have run since the last time this was asked."""
    path = project.folder / "calls"
    found = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return found


def everything(catalog: dm.Catalog) -> list[object]:
    """Return the answers to every question that a project of chains can be asked."""
    answers: list[object] = [dm.forest(catalog), dm.disk_usage(catalog.runs), catalog.runs.list_runs()]
    for info in catalog.pipelines.values():
        answers += [dm.variant_diff(catalog, info.name), dm.source_diff(catalog, info.name)]
        for variant in info.variants:
            answers += [dm.describe(catalog, info.name, variant), dm.overrides(catalog, info.name, variant)]
    names = list(catalog.pipelines)
    answers.append(dm.compare(catalog, names[:2] * 2, "base"))
    for chain in catalog.chains.values():
        answers += [dm.chain_diff(catalog, chain.name), dm.scoreboard(catalog, chain.name)]
        answers += [dm.source_diff(catalog, chain.name, kind="chain")]
        answers += [dm.progress(catalog, chain.name, name) for name in chain.variations]
        answers += [dm.variation_diff(catalog, chain.name, list(chain.variations) * 2)]
    records = catalog.runs.list_runs()
    answers += [dm.siblings(catalog, record) for record in records]
    answers += [dm.why(catalog.runs, record, records[0]) for record in records]
    answers += [dm.find(catalog, query) for query in ("base", records[0].short_fp, "amp>0.05")]
    answers += [catalog.runs.outputs(record) for record in records]
    return answers


def test_f1_reading_changes_nothing_on_disk(project: Project) -> None:
    project.write_all(PTYCHO_PROJECT)
    project.python("run_ablation.py")

    def state() -> dict[Path, tuple[int, int]]:
        return {
            path: (path.stat().st_mtime_ns, path.stat().st_size)
            for path in (project.folder / "runs").rglob("*")
            if ".git" not in path.parts
        }

    before = state()
    everything(project.catalog)
    assert state() == before


@pytest.mark.parametrize("amps", [(1, 2, 3, 4, 5)])
def test_f2_c1_the_run_that_counts_is_that_of_the_present_configuration(
    project: Project, amps: tuple[int, ...]
) -> None:
    source = """
dm.register('v', amp={amp})
def _sim(ctx):
    ctx.metric('sim', 'amp', ctx.config.amp)
PIPELINE = dm.Pipeline('sim', [dm.Stage('sim', _sim)])
CHAIN = dm.Chain('c', [dm.ChainStep('s', PIPELINE)])
CHAIN.variation('only', s='v')
"""
    for amp in amps:
        project.declare("sim", source.replace("{amp}", str(amp))).CHAIN.variations["only"].run(project.runs)
        (row,) = dm.scoreboard(project.catalog, "c").rows
        assert row.values == {"s.sim.amp": amp}
    module = project.declare("sim", source.replace("{amp}", "77"))
    assert dm.progress(project.catalog, "c", "only").outdated, "the source is newer than what is known of it"

    (step,) = dm.progress(dm.Catalog(project.runs), "c", "only").steps
    assert step.status == "stale"
    assert len(step.stale) == len(amps)
    (row,) = dm.scoreboard(dm.Catalog(project.runs), "c").rows
    assert row.values == {}

    project.declare("sim", source.replace("{amp}", "3")).CHAIN.variations["only"].run(project.runs)
    (row,) = dm.scoreboard(project.catalog, "c").rows
    assert row.values == {"s.sim.amp": 3}
    assert module is not sys.modules["sim"]


def chain_of(project: Project, factor: int) -> dict[str, dm.RunRecord]:
    source = f"""
dm.register('v', amp=1)
def helper(x):
    return x * {factor}
def _up(ctx):
    ctx.artifact('up', 'x.txt').write_text(str(helper(ctx.config.amp)))
def _down(ctx):
    text = ctx.upstream_artifact('a', 'stages/up/outputs/x.txt').read_text()
    ctx.metric('down', 'got', int(text))
CHAIN = dm.Chain('c', [
    dm.ChainStep('a', dm.Pipeline('upper', [dm.Stage('up', _up)])),
    dm.ChainStep('b', dm.Pipeline('lower', [dm.Stage('down', _down)]), consumes='a'),
])
CHAIN.variation('only', a='v', b='v')
"""
    return project.declare("chained", source).CHAIN.variations["only"].run(project.runs)


def test_f3_c2_code_upstream_counts_downstream(project: Project) -> None:
    first, second = chain_of(project, 10), chain_of(project, 20)
    assert (first["b"].metrics["down"]["got"]["value"], second["b"].metrics["down"]["got"]["value"]) == (10, 20)
    assert first["b"].fingerprint != second["b"].fingerprint
    assert second["b"].stage_status == {"down": "done"}
    assert chain_of(project, 20)["b"].stage_status == {"down": "cached"}


def test_f4_an_artifact_that_lies_there_already_stays(project: Project) -> None:
    module = project.declare(
        "sim",
        """
def _sim(ctx):
    path = ctx.stage_dir('sim') / 'outputs' / 'x.txt'
    path.write_text('data')
    for how in ('copy', 'link', 'move'):
        assert ctx.artifact('sim', 'x.txt', path, how=how) == path
        assert path.read_text() == 'data'
        assert not path.is_symlink()
dm.register('v')
PIPELINE = dm.Pipeline('sim', [dm.Stage('sim', _sim)])
""",
    )
    record = module.PIPELINE.run("v", project.runs)
    (found,) = project.runs.outputs(record)
    assert (found.relpath, found.size) == ("x.txt", 4)


@pytest.mark.parametrize("version", ["None", "1"], ids=["code", "declared"])
def test_f5_c3_a_failed_stage_never_reads_as_cached(project: Project, version: str) -> None:
    source = """
dm.register('v')
def _sim(ctx):
    path = ctx.stage_dir('sim') / 'outputs' / 'x.txt'
    {body}
PIPELINE = dm.Pipeline('sim', [dm.Stage('sim', _sim, version={version})])
"""
    good = source.format(
        body="path.write_text('GOOD'); ctx.artifact('sim', 'also.txt').write_text('')", version=version
    )
    bad = source.format(body="path.write_text('PARTIAL'); raise ValueError('boom')", version=version)
    record = project.declare("sim", good).PIPELINE.run("v", project.runs)
    with pytest.raises(ValueError, match="boom"):
        project.declare("sim", bad).PIPELINE.run("v", project.runs, force="sim")
    (failed,) = project.runs.list_runs(status="failed")
    assert "ValueError: boom" in failed.errors["sim"]
    assert failed.ended is not None
    assert not (Path(failed.fdir) / "stages/sim/_key").exists()

    again = project.declare("sim", good).PIPELINE.run("v", project.runs)
    assert (Path(again.fdir) / "stages/sim/outputs/x.txt").read_text() == "GOOD"
    assert again.stage_status["sim"] == ("cached" if version == "None" else "done")
    assert again.errors == {}
    assert again.fingerprint == record.fingerprint


NOT_FINITE = """
import math
dm.register('v', bad=float('nan'), worse=[float('inf'), -math.inf], amp=1)
def _sim(ctx):
    ctx.metric('sim', 'nan', float('nan'))
    ctx.metric('sim', 'inf', math.inf, direction='lower')
    ctx.metric('sim', 'fine', 1.5)
PIPELINE = dm.Pipeline('sim', [dm.Stage('sim', _sim)])
CHAIN = dm.Chain('c', [dm.ChainStep('s', PIPELINE)])
CHAIN.variation('only', s='v')
CHAIN.variation('other', s='v')
"""


def refuse(name: str) -> float:
    raise AssertionError(f"{name} is not strict JSON")


def test_f6_c10_not_a_number_is_strict_json_everywhere(project: Project) -> None:
    project.declare("sim", NOT_FINITE).CHAIN.variations["only"].run(project.runs)
    project.declare("fork", NOT_FINITE.replace("'sim', [", "'fork', [").replace("'c'", "'d'"))
    files = [path for path in (project.folder / "runs").rglob("*.json")]
    assert len(files) >= 5
    for path in files:
        json.loads(path.read_text(), parse_constant=refuse)
    text = json.dumps(dm.as_json(everything(dm.Catalog(project.runs))), allow_nan=False)
    assert '{"$float": "nan"}' in text

    row = dm.scoreboard(project.catalog, "c", "only").rows[0]
    assert row.values["s.sim.fine"] == 1.5
    assert np.isnan(row.values["s.sim.nan"])
    assert row.values["s.sim.inf"] == np.inf
    (record,) = project.runs.list_runs("sim")
    config = project.runs.config(record)
    assert np.isnan(config["bad"])
    assert config["worse"] == [np.inf, -np.inf]
    assert config.fingerprint == record.variant_fingerprint


def test_f7_what_only_reads_imports_no_user_code(project: Project) -> None:
    project.write_all(PTYCHO_PROJECT)
    project.python("run_ablation.py")
    before = set(sys.modules)
    everything(project.catalog)
    assert not {name for name in set(sys.modules) - before if not name.startswith(("diffract_dask", "numpy"))} & {
        *PTYCHO_PROJECT,
        "chains.ptycho",
    }
    catalog = project.catalog
    for wrong in ("antigravity", "this", "lib2to3.__main__", "forward_sin"):
        with pytest.raises(UnknownNameError):
            dm.variant_diff(catalog, wrong)
        assert wrong not in sys.modules


def test_f8_looking_for_modules_executes_none(project: Project) -> None:
    marker = "open('executed', 'a').write('x')\n"
    project.write_all({name: marker + source for name, source in PTYCHO_PROJECT.items()})
    project.write(broken=f"{marker}import diffract_dask.runs as dm\ndm.Pipeline('p', [])\nraise ValueError('boom')\n")
    found = {item.module for item in dm.discover(project.folder)}
    assert found == {"forward_sim", "ptyd_convert", "recon", "analysis", "chains.ptycho", "broken"}
    assert "run_ablation" not in found, "it runs things and declares none"
    forest = dm.forest(project.catalog)
    assert [node.name for node in forest.chains] == ["ptycho"]
    assert not (project.folder / "executed").exists()


def test_f9_sources_are_kept_whatever_way_a_module_is_imported(project: Project) -> None:
    project.write(mysim=MYSIM, mysim_v2=MYSIM_V2)
    record = project.load("mysim_v2").PIPELINE.run("jitter", project.runs)
    assert record.snapshot is not None
    assert record.sources == {"mysim": "mysim.py", "mysim_v2": "mysim_v2.py"}, "the helper's module too"
    scripts = project.folder / "runs/_scripts"
    assert (scripts / "mysim_v2.py").read_text() == MYSIM_V2
    from diffract_dask.runs import snapshots

    assert snapshots.show(project.runs.root, record.snapshot, "mysim.py") == MYSIM
    assert snapshots.git(scripts, "status", "--porcelain") == ""


def test_f10_c11_why_names_the_upstream(project: Project) -> None:
    first, second = chain_of(project, 10), chain_of(project, 20)
    found = dm.why(project.runs, first["b"].where, second["b"].where)
    assert not found.same
    assert found.reasons == ["upstream"]
    (step,) = found.upstream
    assert (step.step, step.a_run, step.b_run) == ("a", first["a"].where, second["a"].where)
    deeper = dm.why(project.runs, str(step.a_run), str(step.b_run))
    assert deeper.reasons == ["code", "outputs"]
    assert deeper.stages[0].code_changed
    (source,) = deeper.sources
    assert "-    return x * 10\n+    return x * 20\n" in source.diff


def test_c2_a_helper_a_closure_a_default_and_bound_arguments_count(project: Project) -> None:
    source = """
import functools
{first}
dm.register('v')
{body}
PIPELINE = dm.Pipeline('p', [dm.Stage('s', {fn})])
"""
    plain = "def f(ctx): helper(ctx)\ndef helper(ctx, k={k}): return k + CONSTANT\nCONSTANT = {c}"
    closure = "def make(n):\n    def f(ctx): return n\n    return f"
    called = "class C:\n    def __init__(self, n): self.n = n\n    def __call__(self, ctx): return self.n"
    versions = [
        ("", plain.format(k=1, c=1), "f"),
        ("", plain.format(k=2, c=1), "f"),
        ("", plain.format(k=1, c=2), "f"),
        ("", closure, "make(1)"),
        ("", closure, "make(2)"),
        ("", "def f(ctx, n): pass", "functools.partial(f, n=1)"),
        ("", "def f(ctx, n): pass", "functools.partial(f, n=2)"),
        ("", called, "C(1)"),
        ("", called, "C(2)"),
        ("import tools", "def f(ctx): return tools.helper()", "f"),
        ("", "def f(ctx):\n    from tools import other\n    return other()", "f"),
    ]
    project.write(tools="def helper(): return 1\ndef other(): return 1\n")
    seen = {}
    for first, body, fn in versions:
        text = source.format(first=first, body=body, fn=fn)
        for _ in range(2):
            pipeline = project.declare("p", text).PIPELINE
            seen.setdefault((first, body, fn), set()).add(pipeline.fingerprint(pipeline.variant("v")))
    assert all(len(found) == 1 for found in seen.values()), "the same code has the same fingerprint"
    assert len({next(iter(found)) for found in seen.values()}) == len(versions)

    project.write(tools="def helper(): return 2\ndef other(): return 2\n")
    for first, body, fn in versions[-2:]:
        pipeline = project.declare("p", source.format(first=first, body=body, fn=fn)).PIPELINE
        assert pipeline.fingerprint(pipeline.variant("v")) not in seen[first, body, fn], "a helper elsewhere counts"


def test_c2_helpers_in_packages_count_and_what_is_installed_is_not_even_imported(project: Project) -> None:
    source = """
import package.inner
dm.register('v')
def f(ctx):
    import mpmath, wave, package.late
    return package.inner.deep(ctx) + package.late.more()
PIPELINE = dm.Pipeline('p', [dm.Stage('s', f)])
print(PIPELINE.fingerprint(PIPELINE.variant('v')))
import sys
print(*sorted({'mpmath', 'wave', 'package.late'} & set(sys.modules)))
"""
    project.write(p=f"import diffract_dask.runs as dm\n{source}")
    found = []
    for inner, late in ((1, 1), (2, 1), (2, 2)):
        project.write(
            package____init__="from package import inner\n",
            package__inner=f"import package\ndef deep(ctx): return {inner}\n",
            package__late=f"def more(): return {late}\n",
        )
        found.append(project.python("-B", "p.py").stdout.splitlines())
    assert len({fingerprint for fingerprint, _ in found}) == 3
    assert {loaded for _, loaded in found} == {"package.late"}


def test_c2_comments_and_docstrings_do_not_count_and_processes_agree(project: Project) -> None:
    source = "import diffract_dask.runs as dm\ndm.register('v')\ndef f(ctx):\n    {doc}x = {{'b', 'a'}}\n    return x\n"
    tail = "PIPELINE = dm.Pipeline('p', [dm.Stage('s', f)])\nprint(PIPELINE.fingerprint(PIPELINE.variant('v')))\n"
    found = set()
    for doc in ("", "'''Say what.'''\n    # and why\n\n    "):
        project.write(p=source.format(doc=doc) + tail)
        found |= {project.python("p.py").stdout, project.python("-c", "import p").stdout}
    assert len(found) == 1


def test_c3_outputs_are_verified_and_stale_ones_removed(project: Project) -> None:
    pipeline = project.declare("two", TWO_STAGES).PIPELINE
    record = pipeline.run("base", project.runs)
    folder = Path(record.fdir) / "stages"
    assert calls(project) == ["first", "second"]

    (folder / "second/outputs/y.txt").unlink()
    assert pipeline.run("base", project.runs).stage_status == {"first": "cached", "second": "done"}
    (folder / "first/outputs/x.txt").write_text("11")
    assert pipeline.run("base", project.runs).stage_status["first"] == "done"
    (folder / "second/outputs/extra.txt").write_text("not an output")
    assert pipeline.run("base", project.runs).stage_status["second"] == "done"
    assert not (folder / "second/outputs/extra.txt").exists()
    (folder / "second/metrics.json").write_text("{}")
    assert pipeline.run("base", project.runs).stage_status["second"] == "done"
    assert pipeline.run("base", project.runs).stage_status == {"first": "cached", "second": "cached"}


def test_c3_a_stage_goes_back_and_forth_between_two_codes_without_running_again(project: Project) -> None:
    for text, expected in (("* 10", "done"), ("* 11", "done"), ("* 10", "cached"), ("* 11", "cached")):
        pipeline = project.declare("two", TWO_STAGES.replace("* 10", text)).PIPELINE
        assert pipeline.run("base", project.runs).stage_status["first"] == expected


def test_c3_metrics_of_an_earlier_attempt_do_not_stay(project: Project) -> None:
    source = "dm.register('v')\ndef f(ctx): ctx.metric('s', {name!r}, 1)\n"
    tail = "PIPELINE = dm.Pipeline('p', [dm.Stage('s', f, version=1)])\n"
    project.declare("p", source.format(name="m_old") + tail).PIPELINE.run("v", project.runs)
    record = project.declare("p", source.format(name="m_new") + tail).PIPELINE.run("v", project.runs, force="s")
    assert record.metrics["s"].keys() == {"m_new"}


def test_c4_values_that_differ_have_different_fingerprints() -> None:
    middle = [np.zeros(5000), np.zeros(5000)]
    middle[1][2500] = 1
    different = [1, 1.0, True, "1", None, [1], {"1": 1}, {1: 1}, *middle, middle[0].astype("f4"), 1 + 0j, b"1", {1}]
    assert len({dm.fingerprint(value) for value in different}) == len(different)
    same = [({"a": 1, "b": 2}, {"b": 2, "a": 1}), ((1, 2), [1, 2]), ({3, 1}, {1, 3}), (np.int64(3), 3)]
    for one, other in (*same, ({1: "x", "1": "y"}, {"1": "y", 1: "x"}), (np.arange(3), np.arange(3)[::1])):
        assert dm.fingerprint(one) == dm.fingerprint(other)


@pytest.mark.parametrize(
    "value", [object(), len, threading.Lock(), np.array([object()])], ids=lambda value: str(type(value))
)
def test_c4_what_has_no_canonical_form_is_refused_by_name(value: object) -> None:
    with pytest.raises(UnencodableError, match=r"probe\.bad\[1\]"):
        dm.registry.register("nowhere", "v", probe={"bad": [1, value]})
    assert "nowhere" not in dm.registry.modules()


def test_c5_configurations_are_frozen_and_share_nothing(project: Project) -> None:
    values, array = [1, [2]], np.arange(3)
    variant = dm.registry.register("frozen", "v", probe={"l": values, "a": array}, s={1})
    values[1].append(3)
    values.append(4)
    array[0] = 9
    config = variant.config
    assert (config.probe.l, config.probe.a.tolist(), config.s) == ([1, [2]], [0, 1, 2], {1})
    changes = [
        lambda: config.probe.l.append(1),
        lambda: config.probe.l[1].append(1),
        lambda: config.update(x=1),
        lambda: config.pop("s"),
        lambda: config.probe.__setitem__("l", 1),
        lambda: setattr(config, "x", 1),
        lambda: config.setdefault("x", 1),
        lambda: variant.overrides["probe"]["l"].append(1),
    ]
    for change in changes:
        with pytest.raises(FrozenConfigError):
            change()
    with pytest.raises(ValueError, match="read-only"):
        config.probe.a[0] = 1
    dm.registry.drop_module("frozen")


def test_c5_keys_can_be_unset_and_mappings_replaced() -> None:
    base = dm.Config(probe={"amp": 1, "jitter": True}, notes="x", empty={"a": 1})
    assert dm.Config(base, notes=dm.UNSET, probe={"jitter": dm.UNSET}) == {"probe": {"amp": 1}, "empty": {"a": 1}}
    assert dm.Config(base, probe=dm.replace(phase=2), empty=dm.replace()) == {
        "probe": {"phase": 2},
        "notes": "x",
        "empty": {},
    }
    with pytest.raises(RunError, match=r"nothing to unset at 'probe\.ampp'.*'amp'"):
        dm.Config(base, probe={"ampp": dm.UNSET})


TYPOS = {
    "config key": ("pipeline.run('base', runs)", "'scann'", "'scan'"),
    "force": ("good.run('base', runs, force='sin')", "'sin'", "'sim'"),
    "only": ("good.run('base', runs, only={'simm'})", "'simm'", "'sim'"),
    "input": ("dm.Stage('a', f); dm.Pipeline('p', [dm.Stage('a', f), dm.Stage('b', f, inputs='aa')])", "'aa'", "'a'"),
    "variant": ("good.run('bese', runs)", "'bese'", "'base'"),
    "consumes": (
        "dm.Chain('c', [dm.ChainStep('sim', good), dm.ChainStep('b', good, consumes='sin')])",
        "'sin'",
        "'sim'",
    ),
    "step": ("chain.variation('v', sin='base')", "'sin'", "'sim'"),
    "step's variant": ("chain.variation('v', sim='bese')", "'bese'", "'base'"),
    "base": ("chain.variation('v', base='nonw').run(runs)", "'nonw'", "'none'"),
    "missing step": ("chain.variations['none'].run(runs)", "'late'", "late="),
    "base variant": ("dm.register('x', base='bese')", "'bese'", "'base'"),
    "upstream step": ("reads.run('base', runs, upstream={})", "'sin'", ""),
}


@pytest.mark.parametrize("what", TYPOS)
def test_c6_a_wrong_name_fails_before_anything_runs(project: Project, what: str) -> None:
    code, wrong, near = TYPOS[what]
    source = """
dm.register('base', scan=1)
def f(ctx): open('ran', 'w')
pipeline = dm.Pipeline('bad', [dm.Stage('first', f), dm.Stage('sim', f, config_keys=('scann',))])
good = dm.Pipeline('good', [dm.Stage('sim', f, config_keys=('scan',))])
reads = dm.Pipeline('reads', [dm.Stage('sim', f, upstream={'sin': 'x'})])
chain = dm.Chain('chain', [dm.ChainStep('sim', good), dm.ChainStep('late', reads)])
chain.variation('none', sim='base')
runs = dm.RunRegistry('runs')
def wrong(): CODE
"""
    module = project.declare("typos", source.replace("CODE", code))
    with pytest.raises(RunError) as caught:
        module.wrong()
    assert wrong in str(caught.value)
    assert near in str(caught.value)
    assert not (project.folder / "ran").exists()
    assert not list((project.folder / "runs").glob("*/*/*/run.json"))


def test_c6_a_bare_string_is_one_name(project: Project) -> None:
    stage = dm.Stage("b", print, inputs="ab", config_keys="xyz")
    assert (stage.inputs, stage.config_keys) == (("ab",), ("xyz",))
    with pytest.raises(RunError, match="names no stage"):
        project.declare("two", TWO_STAGES).PIPELINE.run("base", project.runs, only=())


def test_c7_a_run_remembers_every_chain_that_it_served_and_who_computed_it(project: Project) -> None:
    project.write_all(PTYCHO_PROJECT)
    chain = project.load("chains.ptycho").CHAIN
    chain.variations["baseline"].run(project.runs)
    (before,) = project.runs.list_runs("forward_sim")
    records = chain.variations["algo_dm"].run(project.runs)
    (after,) = project.runs.list_runs("forward_sim")
    assert records["forward_sim"].stage_status == {"sim": "cached"}, "what this call did"
    assert after.stage_status == {"sim": "done"}, "where it was computed"
    assert after.computed_by == before.computed_by
    assert (after.chain, after.variation) == ("ptycho", "baseline")
    assert [at["variation"] for at in after.memberships] == ["baseline", "algo_dm"]
    assert (after.started, after.ended, after.pid) == (before.started, before.ended, before.pid)
    (invocation,) = (Path(after.fdir) / "invocations").glob("*.json")
    assert invocation.stem == after.computed_by["sim"]["invocation"]


def test_c9_two_processes_on_one_run_take_turns(project: Project) -> None:
    import subprocess

    source = """
import time
import diffract_dask.runs as dm
dm.register('v')
def f(ctx):
    for name in ('start', 'stop'):
        with open('order', 'a') as file:
            file.write(name + ' ')
        time.sleep(0.3)
PIPELINE = dm.Pipeline('p', [dm.Stage('s', f)])
if __name__ == '__main__':
    print(PIPELINE.run('v', dm.RunRegistry('runs')).stage_status['s'])
"""
    project.write(p=source)
    root = str(Path(dm.__file__).parents[2])
    started = [
        subprocess.Popen(
            [sys.executable, "p.py"], cwd=project.folder, env={"PYTHONPATH": root}, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    said = sorted(process.communicate(timeout=60)[0].strip() for process in started)
    assert said == ["cached", "cached", "done"]
    assert (project.folder / "order").read_text() == "start stop "
