"""What users and their files do that nobody planned: nothing is lost, nothing reads as what it is not."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from projects import Project
from test_runs_findings import TWO_STAGES
from test_runs_running import in_a_stage

import diffract_dask.runs as dm
from diffract_dask.errors import (
    ArtifactError,
    DeclarationError,
    RunError,
    RunFormatError,
    RunInputError,
    UnencodableError,
    UnknownNameError,
)
from diffract_dask.runs import snapshots
from diffract_dask.runs.naming import folder

TWO_KEYS = """
import os
dm.register('v', a=1, b={b})
def f(ctx):
    out = ctx.stage_dir() / 'outputs'
    {body}
def g(ctx): pass
PIPELINE = dm.Pipeline('p', [dm.Stage('f', f, config_keys='a'), dm.Stage('g', g, config_keys='b')])
"""


@pytest.mark.parametrize("text", ["async def f(ctx): pass", "def f(ctx): yield", "async def f(ctx): yield"])
def test_a_function_that_would_not_run_is_refused(project: Project, text: str) -> None:
    with pytest.raises(DeclarationError, match="runs nothing"):
        project.declare("p", f"{text}\nPIPELINE = dm.Pipeline('p', [dm.Stage('s', f)])\n")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "os.symlink('nowhere', ctx.stage_dir() / 'outputs/latest')",
            r"'latest' .* is a link to nothing \('nowhere'\)",
        ),
        ("os.mkfifo(ctx.stage_dir() / 'outputs/pipe')", "'pipe' .* is a pipe, socket or device"),
        ("os.mkdir('d'); os.symlink('nowhere', 'd/l'); ctx.artifact('s', 'x', 'd')", "not all of .* can be copied"),
    ],
)
def test_outputs_that_cannot_be_kept_are_named(project: Project, body: str, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        in_a_stage(project, body)
    assert [run.status for run in project.runs.list_runs()] == ["failed"]


def test_links_and_empty_folders_are_taken_over_as_they_are(project: Project) -> None:
    body = "\n    ".join(
        [
            "(out / 'step5').mkdir(); (out / 'empty/deep').mkdir(parents=True)",
            "(out / 'step5/w').write_text('w')",
            "os.symlink('step5', out / 'latest'); os.symlink(out / 'step5', out / 'absolute')",
        ]
    )
    first = project.declare("p", TWO_KEYS.format(b=1, body=body)).PIPELINE.run("v", project.runs)
    second = project.declare("p", TWO_KEYS.format(b=2, body=body)).PIPELINE.run("v", project.runs)
    assert second.stage_status == {"f": "cached", "g": "done"}
    for record in (first, second):
        out = Path(record.fdir) / "stages/f/outputs"
        assert [os.readlink(out / name) for name in ("latest", "absolute")] == ["step5", "step5"]
        assert (out / "empty/deep").is_dir()


UPSTREAM = {
    "moved away": ("ctx.artifact('s', 'y', it, how='move')", "belongs to another stage or run"),
    "moved away by a link": ("os.symlink(it, 'way'); ctx.artifact('s', 'y', 'way', how='move')", None),
    "written through a link": ("ctx.artifact('s', 'y', it, how='link'); ctx.artifact('s', 'y').write_text('1')", None),
}


@pytest.mark.parametrize("what", UPSTREAM)
def test_an_upstream_run_keeps_its_data(project: Project, what: str) -> None:
    body, message = UPSTREAM[what]
    source = "dm.register('v')\ndef f(ctx): ctx.artifact('s', 'x').write_text('precious')\n"
    pipeline = project.declare("p", source + "PIPELINE = dm.Pipeline('p', [dm.Stage('s', f)])\n").PIPELINE
    upstream = pipeline.run("v", project.runs)
    source = f"""
import os
dm.register('v')
def f(ctx):
    it = ctx.upstream_artifact('u', 'stages/s/outputs/x')
    {body}
PIPELINE = dm.Pipeline('q', [dm.Stage('s', f)])
"""
    pipeline = project.declare("q", source).PIPELINE
    if message is None:
        pipeline.run("v", project.runs, upstream={"u": upstream})
    else:
        with pytest.raises(ArtifactError, match=message):
            pipeline.run("v", project.runs, upstream={"u": upstream})
    assert (Path(upstream.fdir) / "stages/s/outputs/x").read_text() == "precious"


def test_what_comes_after_the_end_of_a_stage_is_refused_and_changes_nothing(project: Project) -> None:
    source = """
dm.register('v')
kept = []
def f(ctx): keep(ctx)
def keep(ctx): kept.append(ctx)
PIPELINE = dm.Pipeline('p', [dm.Stage('s', f, version=1)])
"""
    module = project.declare("p", source)
    module.PIPELINE.run("v", project.runs)
    (ctx,) = module.kept
    for call in (lambda: ctx.metric("s", "late", 1), lambda: ctx.artifact("s", "late")):
        with pytest.raises(ArtifactError, match="after the end of stage 's'"):
            call()
    assert module.PIPELINE.run("v", project.runs).stage_status == {"s": "cached"}


def test_text_that_is_no_utf8_makes_strict_json(project: Project) -> None:
    body = """
open(os.fsencode(ctx.stage_dir() / 'outputs') + b'/a\\xff.txt', 'w').close()
ctx.metric('s', 'text', 'a\\udcff')
"""
    record = in_a_stage(project, body)
    for path in Path(record.fdir).rglob("*.json"):
        json.loads(path.read_bytes().decode("utf8"))
    assert project.runs.metrics(record)["s"]["text"].value == "a\udcff"
    assert in_a_stage(project, body).stage_status["s"] == "cached"


def test_a_key_that_is_no_text_is_no_key(project: Project) -> None:
    pipeline = project.declare("two", TWO_STAGES).PIPELINE
    record = pipeline.run("base", project.runs)
    (Path(record.fdir) / "stages/first/_key").write_bytes(b"\xff\xfe")
    assert pipeline.run("base", project.runs).stage_status["first"] == "done"


def test_pipelines_of_one_name_in_two_modules_are_not_mixed_up(project: Project) -> None:
    source = """
dm.register('v', a={a})
def f(ctx): ctx.metric('s', 'a', ctx.config.a)
CHAIN = dm.Chain('c{a}', [dm.ChainStep('x', dm.Pipeline('sim', [dm.Stage('s', f)]))])
CHAIN.variation('n', x='v')
CHAIN.variation('m', x='v')
"""
    for a, name in ((1, "one"), (2, "two")):
        project.declare(name, source.format(a=a)).CHAIN.variations["n"].run(project.runs)
    catalog = project.catalog
    for a, name in ((1, "one"), (2, "two")):
        assert dm.progress(catalog, f"c{a}", "n").status == "done"
        assert dm.scoreboard(catalog, f"c{a}").rows[0].values == {"x.s.a": a}
        assert dm.variation_diff(catalog, f"c{a}", ["n", "m"]).steps[0].rows[0].values == [a, a]
        assert dm.describe(catalog, name, "v").config == {"a": a}
        assert dm.describe(catalog, f"{name}:sim", "v").config == {"a": a}


def test_a_source_that_is_edited_after_its_import_is_kept_as_it_ran(project: Project) -> None:
    module = project.declare("two", TWO_STAGES)
    project.write(two="import diffract_dask.runs as dm\n" + TWO_STAGES.replace("* 10", "* 11"))
    record = module.PIPELINE.run("base", project.runs)
    assert "* 10" in str(snapshots.show(project.runs.root, record.snapshot, "two.py"))
    assert project.catalog.pipelines["two"].outdated
    record = project.load("two").PIPELINE.run("base", project.runs)
    assert "* 11" in str(snapshots.show(project.runs.root, record.snapshot, "two.py"))
    assert not project.catalog.pipelines["two"].outdated


WRONG = (5, "x", None, [1], ["x"], {"a": 1}, {"a": [1]}, {"a": {"b": 1}}, [{"a": 1}], [[1]], {"first": ["x"]})


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_a_record_that_anybody_may_have_written_stops_no_question(project: Project, wrong: object) -> None:
    pipeline = project.declare("two", TWO_STAGES).PIPELINE
    path = Path(pipeline.run("base", project.runs).fdir) / "run.json"
    good = json.loads(path.read_text())
    for name in good:
        path.write_text(json.dumps({**good, name: wrong}))
        catalog = project.catalog
        dm.forest(catalog), dm.find(catalog, "base"), dm.disk_usage(catalog.runs)
        dm.prune(catalog.runs, keep_last=0, older_than_days=0)
        for record in catalog.runs.list_runs():
            dm.why(catalog.runs, record, record), dm.siblings(catalog, record), catalog.runs.outputs(record)
            json.dumps(dm.as_json(record), allow_nan=False)
    path.write_text(json.dumps(good))
    assert pipeline.run("base", project.runs).stage_status == {"first": "cached", "second": "cached"}


def test_a_name_that_looks_like_a_condition_is_found(project: Project) -> None:
    source = "dm.register('rate=0.1', rate=0.1, top=float('inf'))\ndef f(ctx): pass\n"
    project.declare("p", source + "PIPELINE = dm.Pipeline('p', [dm.Stage('s', f)])\n").PIPELINE.run(
        "rate=0.1", project.runs
    )
    for query in ("rate=0.1", "rate=0.", "rate = 1e-1", "top=inf", "top=Infinity", "top>5"):
        assert {item.kind for item in dm.find(project.catalog, query)} == {"run", "variant"}, query
    assert dm.find(project.catalog, "top=-inf") == []


def test_scores_beyond_all_numbers_are_compared(project: Project) -> None:
    source = """
dm.register('v', a=1)
dm.register('w', a=2)
def f(ctx):
    ctx.metric('s', 'huge', 10**400 if ctx.config.a == 1 else 1.5, direction='lower')
    ctx.metric('s', 'inf', float('inf') * (1 if ctx.config.a == 1 else -1), direction='lower')
    ctx.metric('s', 'same', float('inf'), direction='lower')
    ctx.metric('s', 'nan', float('nan'), direction='lower')
CHAIN = dm.Chain('c', [dm.ChainStep('x', dm.Pipeline('p', [dm.Stage('s', f)]))])
CHAIN.variation('first', x='v')
CHAIN.variation('second', x='w')
"""
    for variation in project.declare("p", source).CHAIN.variations.values():
        variation.run(project.runs)
    row = dm.scoreboard(project.catalog, "c", "second").rows[0]
    assert row.better == {"x.s.inf": False, "x.s.same": None}
    assert "x.s.huge" not in row.deltas
    json.dumps(dm.as_json(row), allow_nan=False)


@pytest.mark.parametrize(
    "wrong", [5, "x", None, [1], {"a": 1}, {"x.txt": {"size": 2}}, {"../../../x": "/etc"}], ids=repr
)
def test_damaged_notes_of_a_stage_vouch_for_nothing(project: Project, wrong: object) -> None:
    first = project.declare("two", TWO_STAGES).PIPELINE.run("base", project.runs)
    path = Path(first.fdir) / "stages/first/_meta.json"
    good = json.loads(path.read_text())
    for i, name in enumerate(("outputs", "links", "empty", "checkpoints", "components", "computed_by")):
        path.write_text(json.dumps({**good, name: wrong}))
        dm.why(project.runs, first, first), project.runs.outputs(first)
        other = project.declare("two", TWO_STAGES.replace("b=2", f"b={i + 3}")).PIPELINE.run("base", project.runs)
        assert (Path(other.fdir) / "stages/first/outputs/x.txt").read_text() == "10"
    assert not [path for path in (project.folder / "runs").rglob("x") if path.is_symlink()]


def paths_of(data: object, above: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [found for key, item in pairs for found in ((*above, key), *paths_of(item, (*above, key)))]


@pytest.mark.parametrize("wrong", [None, [1]], ids=repr)
def test_a_damaged_manifest_is_named_and_stops_no_question(project: Project, wrong: object) -> None:
    source = """
dm.register('v', a=1)
dm.register('w', base='v', a=2)
def f(ctx): pass
CHAIN = dm.Chain('c', [dm.ChainStep('x', dm.Pipeline('p', [dm.Stage('s', f)]))])
CHAIN.variation('n', x='v')
"""
    project.declare("one", source).CHAIN.variations["n"].run(project.runs)
    path = project.folder / "runs/_manifests/one.json"
    good = path.read_text()
    for where in paths_of(json.loads(good)):
        data = json.loads(good)
        at = data
        for key in where[:-1]:
            at = at[key]
        at[where[-1]] = wrong
        path.write_text(json.dumps(data))
        catalog = dm.Catalog(project.runs, live=False)
        dm.forest(catalog), dm.find(catalog, "v")
        for ask in (dm.scoreboard, dm.chain_diff):
            with contextlib.suppress(UnknownNameError):
                ask(catalog, "c")
        damaged = [item for item in catalog.errors if "one.json is damaged" in item.error]
        assert damaged or "c" in catalog.chains or where[0] in ("module", "chains")
        path.write_text(good)


def test_a_stage_that_changes_what_its_code_refers_to_is_told(project: Project) -> None:
    source = "dm.register('v')\nseen = []\ndef f(ctx): seen.append(VALUE)\n"
    tail = "PIPELINE = dm.Pipeline('p', [dm.Stage('s', f)])\n"
    for value in ("1", "(i for i in ())"):
        record = project.declare("p", source.replace("VALUE", value) + tail).PIPELINE.run("v", project.runs)
        assert any("will be computed again" in text for text in record.warnings)
    record = project.declare("p", source.replace("seen.append(VALUE)", "pass") + tail).PIPELINE.run("v", project.runs)
    assert record.warnings == []


def test_a_name_like_that_of_a_long_one_has_a_folder_of_its_own(project: Project) -> None:
    names = ["x" * 300, folder("x" * 300)]
    source = "".join(f"dm.register({name!r})\n" for name in names) + "def f(ctx): pass\n"
    pipeline = project.declare("p", source + "PIPELINE = dm.Pipeline('p', [dm.Stage('s', f)])\n").PIPELINE
    for name in names:
        pipeline.run(name, project.runs)
    assert [len(project.runs.list_runs("p", name)) for name in names] == [1, 1]


def test_an_integer_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(UnencodableError, match="4000 digits"):
        dm.fingerprint(10**5000)


KEPT = """
dm.register('v', k={k})
def f(ctx): ctx.artifact('s', 'x').write_text('same')
PIPELINE = dm.Pipeline('p', [dm.Stage('s', f)])
"""
LINKS = """
dm.register('v')
def f(ctx): ctx.artifact('s', 'y', ctx.upstream_artifact('u', 'stages/s/outputs/x'), how='link')
PIPELINE = dm.Pipeline('q', [dm.Stage('s', f, upstream={'u': 'stages/s/outputs/x'})])
"""


def test_prune_leaves_runs_that_links_lead_into(project: Project) -> None:
    for k in (1, 2):
        upstream = {"u": project.declare("p", KEPT.format(k=k)).PIPELINE.run("v", project.runs)}
        record = project.declare("q", LINKS).PIPELINE.run("v", project.runs, upstream=upstream)
    assert record.stage_status == {"s": "cached"}, (
        "its link leads to the first run, and it was computed from the second"
    )
    for other in project.runs.list_runs("q"):
        if other.fingerprint != record.fingerprint:
            (Path(other.fdir) / "run.json").unlink()
    (left,) = dm.prune(project.runs, pipeline="p", keep_last=1, dry_run=False)
    assert left.kept == f"{record.where} was computed from it"
    assert (Path(record.fdir) / "stages/s/outputs/y").read_text() == "same"


@pytest.mark.parametrize("change", ["removed", "edited"])
def test_an_upstream_that_is_not_what_it_was_is_refused(project: Project, change: str) -> None:
    upstream = project.declare("p", KEPT.format(k=1)).PIPELINE.run("v", project.runs)
    path = Path(upstream.fdir) / "stages/s/outputs/x"
    path.unlink() if change == "removed" else path.write_text("other")
    with pytest.raises(RunInputError, match="has been changed or removed since"):
        project.declare("q", LINKS).PIPELINE.run("v", project.runs, upstream={"u": upstream})


def test_a_stage_that_removes_its_own_folder_put_out_nothing(project: Project) -> None:
    record = in_a_stage(project, "import shutil; ctx.artifact('s', 'x').write_text(''); shutil.rmtree(ctx.stage_dir())")
    assert record.stage_status["s"] == "done"
    assert project.runs.outputs(record) == []


def test_keys_with_dots_and_dollars_are_told_apart(project: Project) -> None:
    configs = {"p": {"a.b": 1}, "q": {"a": {"b": 1}}, "r": {"a.b": 2, "a": {"b": 1}}, "s": {"a": {"$set": 3}}}
    for name, config in configs.items():
        source = f"dm.register('v', {config})\ndef f(ctx): pass\nPIPELINE = dm.Pipeline({name!r}, [dm.Stage('s', f)])\n"
        project.declare(name, source).PIPELINE.run("v", project.runs)
    catalog = project.catalog
    rows = {row.path: row.values for row in dm.compare(catalog, configs, "v").rows}
    assert rows == {"'a.b'": [1, None, 2, None], "a.b": [None, 1, 1, None], "a.$set": [None, None, None, 3]}
    assert {item.name for item in dm.find(catalog, "a.b=1")} == {"p/v", "q/v", "r/v"}
    assert {item.name for item in dm.find(catalog, "a.$set>2")} == {"s/v"}


def test_runs_of_diffman_are_listed_whatever_their_folders_are_called(project: Project) -> None:
    path = project.folder / "runs/_old/_x/abcdef012345"
    path.mkdir(parents=True)
    record = {"pipeline": "_old", "variant": "_x", "fingerprint": "abcdef012345" + "0" * 52, "stage_keys": {}}
    (path / "run.json").write_text(json.dumps(record))
    assert [run.where for run in project.runs.list_runs()] == ["_old/_x/abcdef012345"]


MISTAKES = [
    "m.P.run('v', 'runs')",
    "m.P.run('v', runs, upstream='x')",
    "m.P.run('v', runs, force=3)",
    "m.C.variations['nn'].run(runs)",
    "m.C.variations['n'].run('runs')",
    "m.C.variations['n'].run(runs, force='x')",
    "m.C.variation('z', x=3)",
    "dm.Chain('c', [m.P])",
    "dm.Pipeline('p', None)",
    "dm.register('q', base=3)",
    "dm.register('q', forks_of=3)",
    "dm.register('q', 'x')",
    "dm.prune(runs, status='faild')",
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_of_the_wrong_kind_is_said_in_words(project: Project, mistake: str) -> None:
    source = """
dm.register('v')
def f(ctx): pass
P = dm.Pipeline('p', [dm.Stage('s', f)])
C = dm.Chain('c', [dm.ChainStep('x', P)])
C.variation('n', x='v')
"""
    module = project.declare("p", source)
    with pytest.raises(RunError):
        eval(mistake, {"dm": dm, "m": module, "runs": project.runs})


def test_one_status_is_not_split_into_letters(project: Project) -> None:
    in_a_stage(project, "pass")
    assert len(dm.prune(project.runs, status="partial")) == 1


def test_a_run_of_a_later_format_is_read_and_never_written_over(project: Project) -> None:
    pipeline = project.declare("two", TWO_STAGES).PIPELINE
    record = pipeline.run("base", project.runs)
    file = Path(str(record.path)) / "run.json"
    later = {**json.loads(file.read_text()), "schema": 99, "new_in_99": [1]}
    file.write_text(json.dumps(later))
    runs = dm.RunRegistry(project.runs.root)
    assert [run.schema for run in runs.list_runs()] == [99]
    with pytest.raises(RunFormatError, match=r"99.*upgrade"):
        pipeline.run("base", runs)
    assert json.loads(file.read_text()) == later
