"""SIGKILL at any moment: no file is torn, what is not done never reads as done, and work goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from projects import Project

import diffract_dask.runs as dm
from diffract_dask.runs import snapshots

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")]

WORKER = """
import diffract_dask.runs as dm
for i in range(4):
    dm.register(f'v{i}', amp=i)

def _one(ctx):
    folder = ctx.stage_dir('one') / 'outputs'
    for i in range(5):
        (folder / f'{i}.txt').write_text(str(ctx.config.amp) * 1000)
        ctx.metric('one', f'm{i}', i)

def _two(ctx):
    text = (ctx.stage_dir('one') / 'outputs/4.txt').read_text()
    ctx.artifact('two', 'joined.txt').write_text(text * 100)

def _three(ctx):
    text = ctx.upstream_artifact('up', 'stages/two/outputs/joined.txt').read_text()
    ctx.metric('three', 'size', len(text))

up = dm.Pipeline('up', [dm.Stage('one', _one), dm.Stage('two', _two, inputs='one')])
down = dm.Pipeline('down', [dm.Stage('three', _three)])
CHAIN = dm.Chain('c', [dm.ChainStep('up', up), dm.ChainStep('down', down, 'up')])
for i in range(4):
    CHAIN.variation(f'v{i}', up=f'v{i}', down=f'v{i}')

if __name__ == '__main__':
    import sys, time
    print('ready', flush=True)
    runs = dm.RunRegistry('runs')
    if sys.argv[1] == 'once':
        for variation in CHAIN.variations.values():
            variation.run(runs)
    while sys.argv[1] != 'once':
        for name in CHAIN.variations:
            CHAIN.variations[name].run(runs, force={'up': ('one', 'two'), 'down': 'three'})
"""


def run_and_kill(project: Project, seconds: float) -> None:
    environment = {"PYTHONPATH": str(Path(dm.__file__).parents[2]), "PATH": os.environ["PATH"]}
    command = [sys.executable, "worker.py", "forever"]
    with subprocess.Popen(
        command, cwd=project.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        assert process.stderr.read() == ""


def check(project: Project) -> dict[str, int]:
    """Every file is whole and nothing reads as done that is not; return how many stages have which status."""
    for path in (project.folder / "runs").rglob("*.json"):
        json.loads(path.read_text())
    runs, counts = project.runs, {}
    for record in runs.list_runs():
        assert record.status != "running", "nobody works on it"
        for stage in record.stages:
            status = record.stage_status.get(stage, "pending")
            counts[status] = counts.get(status, 0) + 1
            path = runs.stage_path(record, stage)
            if (path / "_key").exists():
                meta = runs.meta(record, stage)
                assert meta["key"] == (path / "_key").read_text()
                assert all(not output.missing and output.sha256 for output in runs.outputs(record, stage))
                assert len(runs.outputs(record, stage)) == {"one": 5, "two": 1, "three": 0}[stage]
            elif status in ("done", "cached"):
                raise AssertionError(f"{record.where}: {stage} is said to be {status} and has no key")
    return counts


def test_thirty_kills_tear_nothing(project: Project) -> None:
    project.write(worker=WORKER)
    moments = random.Random(5)
    seen: dict[str, int] = {}
    for _ in range(30):
        run_and_kill(project, moments.uniform(0.0, 0.6))
        for status, count in check(project).items():
            seen[status] = seen.get(status, 0) + count
    assert seen.get("interrupted", 0) > 0, "some kills came in the middle of a stage"
    project.python("worker.py", "once")
    assert check(project) == {"done": 12}
    catalog = project.catalog
    for i in range(4):
        assert dm.progress(catalog, "c", f"v{i}").status == "done"
    board = dm.scoreboard(catalog, "c")
    assert [row.values["down.three.size"] for row in board.rows] == [100000] * 4
    assert snapshots.git(project.folder / "runs/_scripts", "fsck") == ""
    left = [path for path in (project.folder / "runs").rglob("*.partial") if ".git" not in path.parts]
    assert len(left) <= 30
