"""A small project of forked pipelines and chains, run once in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["make_project", "run_project"]

ROOT = Path(__file__).resolve().parent.parent

_FILES = {
    "mysim.py": """
import numpy as np
import diffract_dask.runs as dm

dm.register("base", scan=dict(width=5e-6, step=1e-7), amp=1.0)
dm.register("jitter", base="base", amp=2.0)
dm.register("nan", base="base", amp=float("nan"))

def _sim(ctx):
    field = np.arange(12.0).reshape(3, 4) * ctx.config.amp
    np.save(ctx.artifact("sim", "field.npy"), field)
    ctx.artifact("sim", "notes/info.txt").write_text(f"amp {ctx.config.amp}\\n")
    ctx.metric("sim", "mean", float(field.mean()), units="V", direction="higher")

PIPELINE = dm.Pipeline("mysim", [dm.Stage("sim", _sim, config_keys=("scan", "amp"))])
""",
    "mysim_v2.py": """
import diffract_dask.runs as dm
from mysim import _sim

dm.register("base", scan=dict(width=8e-6, step=1e-7), amp=1.0)
dm.register("louder", base="base", forks_of="jitter", amp=3.0)
dm.register("lost", base="base", forks_of="jiter")

PIPELINE = dm.Pipeline("mysim_v2", [dm.Stage("sim", _sim)], parent="mysim")
""",
    "recon.py": """
import numpy as np
import diffract_dask.runs as dm

dm.register("plain", gain=1)
dm.register("bad", gain=0)

def _rec(ctx):
    field = np.load(ctx.upstream_artifact("sim", "stages/sim/outputs/field.npy"))
    ctx.metric("rec", "error", 1 / ctx.config.gain * float(field.sum()), direction="lower")

PIPELINE = dm.Pipeline("recon", [dm.Stage("rec", _rec)])
""",
    "chains.py": """
import diffract_dask.runs as dm
import mysim, mysim_v2, recon

CHAIN = dm.Chain("ptycho", [
    dm.ChainStep("sim", mysim.PIPELINE), dm.ChainStep("rec", recon.PIPELINE, consumes=("sim",)),
])
CHAIN.variation("baseline", sim="base", rec="plain")
CHAIN.variation("loud", base="baseline", sim="jitter")
CHAIN.variation("nans", base="baseline", sim="nan")
CHAIN.variation("fails", base="baseline", rec="bad")

V2 = dm.Chain("ptycho_v2", [
    dm.ChainStep("sim", mysim_v2.PIPELINE), dm.ChainStep("rec", recon.PIPELINE, consumes=("sim",)),
], parent="ptycho")
V2.variation("baseline", sim="base", rec="plain")
""",
    "run_all.py": """
import contextlib
import diffract_dask.runs as dm
import mysim_v2
from chains import CHAIN

if __name__ == "__main__":
    registry = dm.RunRegistry("runs")
    for name in ("baseline", "loud", "nans", "fails"):
        with contextlib.suppress(ZeroDivisionError):
            CHAIN.variations[name].run(registry)
    mysim_v2.PIPELINE.run("base", registry)
""",
    "broken.py": "import diffract_dask.runs as dm\ndm.register('x')\nraise RuntimeError('boom at import')\n",
}


def make_project(folder: Path) -> Path:
    """Write the sources of the project into a folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in _FILES.items():
        (folder / name).write_text(text.lstrip("\n"))
    return folder


def run_project(folder: Path) -> Path:
    """Make the project and run it there; return the folder."""
    make_project(folder)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "run_all.py"], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder
