"""Folders of user modules that declare pipelines and chains, for the tests of runs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import diffract_dask.runs as dm

MYSIM = """
import diffract_dask.runs as dm

dm.register('base',   scan=dict(width=5e-6, step=1e-7))
dm.register('jitter', base='base', probe=dict(jitter=True, amp=0.1))

def _sim(ctx):
    cfg = ctx.variant.config
    # Run your tool wherever it writes naturally:
    tmp = 'out.npy'
    np.save(tmp, np.arange(4) * cfg.scan.width)
    # Register it under stages/sim/outputs/out.npy (symlink or copy):
    ctx.artifact('sim', 'out.npy', tmp)

PIPELINE = dm.Pipeline('mysim', [
    dm.Stage('sim', _sim, config_keys=('scan', 'probe')),
])

import numpy as np
"""

MYSIM_V2 = """
import diffract_dask.runs as dm
from mysim import _sim

dm.register('base',   scan=dict(width=8e-6, step=1e-7))     # width tweaked
dm.register('jitter', base='base', probe=dict(jitter=True, amp=0.5))
# New variant unique to the fork:
dm.register('hires',  base='jitter', scan=dict(step=1e-8))

PIPELINE = dm.Pipeline('mysim_v2', [
    dm.Stage('sim', _sim, config_keys=('scan', 'probe')),
], parent='mysim')
"""

FORWARD_SIM = """
import diffract_dask.runs as dm

dm.register('base', amp=0.0)
dm.register('jitter_low', base='base', amp=0.1)
dm.register('jitter_high', base='base', amp=0.2)

def _sim(ctx):
    out = ctx.stage_dir('sim') / 'outputs' / 'field.txt'
    out.write_text(str(ctx.config.amp))

PIPELINE = dm.Pipeline('forward_sim', [dm.Stage('sim', _sim, config_keys=('amp',))])
"""

PTYD_CONVERT = """
import diffract_dask.runs as dm

dm.register('default', scale=2)

def _convert(ctx):
    field = ctx.upstream_artifact('forward_sim', 'stages/sim/outputs/field.txt').read_text()
    ctx.artifact('convert', 'data.txt').write_text(str(float(field) * ctx.config.scale))

PIPELINE = dm.Pipeline('ptyd_convert', [dm.Stage('convert', _convert)])
"""

RECON = """
import diffract_dask.runs as dm

dm.register('ePIE', algo='ePIE', gain=1)
dm.register('DM', algo='DM', gain=3)

def _rec(ctx):
    data = ctx.upstream_artifact('ptyd_convert', 'stages/convert/outputs/data.txt').read_text()
    ctx.artifact('recon', 'result.txt').write_text(str(float(data) * ctx.config.gain))
    ctx.metric('recon', 'algo', ctx.config.algo)

PIPELINE = dm.Pipeline('recon', [dm.Stage('recon', _rec)])
"""

ANALYSIS = """
import diffract_dask.runs as dm

dm.register('standard', half_period_nm=12.5)

def _frc(ctx):
    recon_path = ctx.upstream_artifact('recon',
                                       'stages/recon/outputs/result.txt')
    truth_path = ctx.upstream_artifact('forward_sim',
                                       'stages/sim/outputs/field.txt')
    score = compute_frc(recon_path, truth_path)
    hp_nm = ctx.config.half_period_nm
    ctx.metric('frc', 'score_at_half_period', score)
    ctx.metric('frc', 'half_period_nm', hp_nm)

def compute_frc(recon, truth):
    return 1 + float(recon.read_text()) - float(truth.read_text())

PIPELINE = dm.Pipeline('analysis', [dm.Stage('frc', _frc)])
"""

PTYCHO = """
# chains/ptycho.py
import diffract_dask.runs as dm
import forward_sim, ptyd_convert, recon, analysis

CHAIN = dm.Chain('ptycho', steps=[
    dm.ChainStep('forward_sim',  forward_sim.PIPELINE),
    dm.ChainStep('ptyd_convert', ptyd_convert.PIPELINE,
                 consumes=('forward_sim',)),
    dm.ChainStep('recon',        recon.PIPELINE,
                 consumes=('ptyd_convert',)),
    dm.ChainStep('analysis',     analysis.PIPELINE,
                 consumes=('recon', 'forward_sim')),   # FRC needs both
])

CHAIN.variation('baseline',
    forward_sim='base', ptyd_convert='default',
    recon='ePIE', analysis='standard')
CHAIN.variation('jitter_low',  base='baseline', forward_sim='jitter_low')
CHAIN.variation('jitter_high', base='jitter_low', forward_sim='jitter_high')
CHAIN.variation('algo_dm',     base='baseline', recon='DM')
"""

RUN_ABLATION = """
# run_ablation.py
import diffract_dask.runs as dm
from chains.ptycho import CHAIN

rr = dm.RunRegistry('runs')
for name in ['baseline', 'jitter_low', 'jitter_high', 'algo_dm']:
    CHAIN.variations[name].run(rr)
"""

PTYCHO_PROJECT = {
    "forward_sim": FORWARD_SIM,
    "ptyd_convert": PTYD_CONVERT,
    "recon": RECON,
    "analysis": ANALYSIS,
    "chains/ptycho": PTYCHO,
    "run_ablation": RUN_ABLATION,
}


class Project:
    """A folder that modules are imported from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.before = set(sys.modules)
        self.declared = set(dm.registry.modules())
        sys.path.insert(0, str(folder))

    @property
    def runs(self) -> dm.RunRegistry:
        """A fresh registry of the runs below the folder."""
        return dm.RunRegistry(self.folder / "runs")

    @property
    def catalog(self) -> dm.Catalog:
        """What manifests alone tell of the project."""
        return dm.Catalog(self.runs, self.folder, live=False)

    def write(self, **sources: str) -> None:
        """Write modules; ``__`` in a name is a folder."""
        for name, source in sources.items():
            path = self.folder / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf8")

    def write_all(self, sources: dict[str, str]) -> None:
        """Write modules by path."""
        self.write(**{name.replace("/", "__"): source for name, source in sources.items()})

    def load(self, name: str) -> ModuleType:
        """Import a module anew, as another process would."""
        self._unload(self._own())
        importlib.invalidate_caches()
        return importlib.import_module(name)

    def declare(self, name: str, source: str) -> ModuleType:
        """Write a module and import it anew."""
        self.write(**{name: f"import diffract_dask.runs as dm\n{source}"})
        return self.load(name)

    def python(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run Python in the folder."""
        environment = {"PYTHONPATH": str(Path(dm.__file__).parents[2]), "PATH": "/usr/local/bin:/usr/bin:/bin"}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def _own(self) -> list[str]:
        found = []
        for name in set(sys.modules) - self.before:
            file = getattr(sys.modules[name], "__file__", None)
            paths = [file] if file else list(getattr(sys.modules[name], "__path__", []))
            if any(str(path).startswith(str(self.folder)) for path in paths):
                found.append(name)
        return found

    def _unload(self, names: list[str]) -> None:
        for name in names:
            del sys.modules[name]
            dm.registry.drop_module(name)
        for cached in self.folder.rglob("__pycache__/*.pyc"):
            cached.unlink()  # two versions within one second, of one length, have one cache

    def forget(self) -> None:
        """Undo what imports did."""
        self._unload(self._own())
        for name in set(dm.registry.modules()) - self.declared:
            dm.registry.drop_module(name)
        sys.path.remove(str(self.folder))
