"""The whole catalogue of fields beside diffract-core and bare NumPy.

``python -m benchmarks.peers.catalogue [--peer PYTHON] [--out FILE]``. Two comparisons: every slice- and model-level
field that Diffract has on the matrices of its golden values (two models, ``tests/data/diffract_[ab].npz``), and the
spectral set with power law, Marchenko–Pastur, Tracy–Widom and the null on MiniLM. Without ``--peer`` (an interpreter
that has diffract-core) the peer's figures are those recorded in `RECORDED`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import machine
from benchmarks.fetch_real_weights import folder as real_weights

HERE = Path(__file__).resolve().parent
GOLDEN = tuple(HERE.parent.parent / "tests" / "data" / f"diffract_{model}.npz" for model in "ab")

RECORDED = {"golden": 240.0, "minilm": 8.9}
"""Seconds of diffract-core 0.3.1 on two quiet cores: 60 matrices of the golden inputs; MiniLM."""

SPECTRAL = ["frob_norm", "nuclear_norm", "l2_norm", "effective_rank", "stable_rank", "hard_rank", "esd_max", "esd_min"]
NOISE = [
    "mp_esd_max",
    "mp_esd_min",
    "mp_bulk_std",
    "mp_sval_max",
    "mp_ks",
    "mp_concentration",
    "mp_presence",
    "mp_num_spikes",
    "mp_soft_rank",
    "tw_esd_bound",
    "tw_num_spikes",
    "w1_rand_distance",
    "esd_rand_max",
    "esd_rand_min",
]
POWER_LAW = [
    "pl_alpha",
    "pl_esd_xmin",
    "pl_ks",
    "pl_concentration",
    "pl_presence",
    "pl_alpha_norm",
    "pl_alpha_weighted",
]
OTHER_FITS = [
    "tpl_alpha",
    "tpl_lambda",
    "tpl_esd_xmin",
    "tpl_ks",
    "tpl_concentration",
    "tpl_presence",
    "tpl_scale",
    "tpl_alpha_norm",
    "expon_lambda",
    "expon_esd_xmin",
    "expon_ks",
    "expon_concentration",
    "expon_presence",
    "expon_scale",
]
MATRIX = [
    "greater_dim",
    "lower_dim",
    "aspect_ratio",
    "weights_std",
    "weights_rand",
    "weights_lsvs",
    "weights_svals",
    "weights_rsvs",
    "weights_rand_lsvs",
    "weights_rand_svals",
    "weights_rand_rsvs",
    "esd",
    "esd_rand",
    "max_weights_sval",
    "min_weights_sval",
    "max_weights_rand_sval",
    "min_weights_rand_sval",
]
MODEL = [
    "log_norm",
    "log_spectral_norm",
    "log_prod_frob_norm",
    "log_prod_spectral_norm",
    "param_norm",
    "model_pl_alpha_norm",
    "model_tpl_alpha_norm",
]
CATALOGUE = (*MATRIX, *SPECTRAL, *NOISE, *POWER_LAW, *OTHER_FITS, *MODEL)
SPECTRAL_SET = (*SPECTRAL, *POWER_LAW, *NOISE)


def available(fields: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return which of the fields this package has, and which it lacks."""
    from diffract_dask.kernel import Registry
    from diffract_dask.kernels import BUILTIN

    known = Registry(BUILTIN).fields
    return [name for name in fields if name in known], [name for name in fields if name not in known]


def arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the matrices of an npz file."""
    with np.load(path) as archive:
        return {name: archive[name] for name in archive if archive[name].ndim == 2}


def ours(models: Sequence[Any], fields: Sequence[str], repeats: int) -> dict[str, Any]:
    """Return the seconds of each run, models in memory, and the number of slices; imports are not counted."""
    from diffract_dask import Session

    seconds, slices = [], 0
    for run in range(repeats + 1):
        with Session(profile="ram") as session:
            for number, model in enumerate(models):
                session.models.add(model, f"model-{number}")
            start = time.perf_counter()
            summary = session.compute.apply(*fields)
            if run:
                seconds.append(time.perf_counter() - start)
            assert not summary.failed, summary
            tables = [session.models.parameters(name) for name in session.models.list()]
            slices = sum(int((table.skip_reason == "").sum()) for table in tables)
    return {"seconds": seconds, "matrices": slices, "fields": len(fields)}


def peer(python: str, fields: Sequence[str], repeats: int, paths: Sequence[Path]) -> dict[str, Any]:
    """Return the figures of diffract-core, run by its own interpreter."""
    command = [python, str(HERE / "diffract_catalogue.py"), ",".join(fields), str(repeats), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:2])} failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def bare(matrices: Sequence[NDArray[Any]], workers: int = 2) -> float:
    """Return the seconds of the same work in plain NumPy: two spectra, a power law, the laws of noise."""
    from diffract_dask.blas import blas_threads

    with blas_threads(1), ThreadPoolExecutor(workers) as pool:
        start = time.perf_counter()
        list(pool.map(_bare_one, sorted(matrices, key=lambda w: -w.size)))
        return time.perf_counter() - start


def _bare_one(w: NDArray[Any]) -> tuple[float, ...]:
    spectra = []
    shuffled = w.reshape(-1).copy()
    np.random.default_rng(42).shuffle(shuffled)
    for x in (w, shuffled.reshape(w.shape)):
        a = (x if x.shape[0] >= x.shape[1] else x.T).astype(np.float64)
        spectra.append(np.maximum(np.linalg.eigvalsh(a.T @ a), 0.0) / len(a))
    values, null = spectra
    x = values[values > 0]
    tails = np.arange(len(x), 0, -1)[:-1]
    logs = np.cumsum(np.log(x)[::-1])[::-1][:-1] - tails * np.log(x)[:-1]
    alpha = 1 + tails / logs
    best = np.inf
    for i, exponent in enumerate(alpha):
        law = 1 - (x[i:] / x[i]) ** (1 - exponent)
        best = min(best, np.abs(law - np.arange(len(law)) / len(law)).max())
    edge = w.var(dtype=np.float64) * (1 + np.sqrt(len(values) / max(w.shape))) ** 2
    spikes, distance = np.count_nonzero(values > edge), np.abs(values - null).mean() / values.mean()
    share = np.sqrt(values) / np.sqrt(values).sum()
    entropy = -(share * np.log(share, where=share > 0, out=np.zeros_like(share))).sum()
    return best, spikes, distance, np.exp(entropy), values.sum() / values[-1], (values > 1e-5 * values[-1]).sum()


def golden(python: str | None, repeats: int) -> dict[str, Any]:
    """Return the figures on the golden inputs."""
    fields, lacking = available(CATALOGUE)
    found: dict[str, Any] = {"ours": ours([arrays(path) for path in GOLDEN], fields, repeats), "lacking": lacking}
    if python:
        found["diffract"] = peer(python, CATALOGUE, 1, GOLDEN)
    found["diffract_recorded"] = RECORDED["golden"]
    return found


def minilm(python: str | None, repeats: int, path: Path) -> dict[str, Any]:
    """Return the figures on MiniLM."""
    from diffract_dask.sources import open_checkpoint

    fields, lacking = available(SPECTRAL_SET)
    tensors = open_checkpoint(str(path)).tensors
    matrices = [t.read(0, t.shape[0]) for t in tensors if len(t.shape) == 2 and t.dtype == "float32"]
    found: dict[str, Any] = {"ours": ours([path], fields, repeats), "lacking": lacking}
    found["bare_numpy"] = {"seconds": [bare(matrices) for _ in range(repeats)], "matrices": len(matrices)}
    if python:
        found["diffract"] = peer(python, SPECTRAL_SET, repeats, [path])
    found["diffract_recorded"] = RECORDED["minilm"]
    return found


def main(argv: list[str] | None = None) -> int:
    """Run what can be run and print one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="interpreter that has diffract-core 0.3.1")
    parser.add_argument("--only", choices=["golden", "minilm"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--checkpoint", type=Path, default=real_weights() / "minilm" / "model.safetensors")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "catalogue.json")
    args = parser.parse_args(argv)
    results: dict[str, Any] = {"machine": machine.facts()}
    if args.only != "minilm":
        results["golden"] = golden(args.peer, args.repeats)
    if args.only != "golden" and args.checkpoint.exists():
        results["minilm"] = minilm(args.peer, args.repeats, args.checkpoint)
    for name in [name for name in ("golden", "minilm") if name in results]:
        found = results[name]
        own = min(found["ours"]["seconds"])
        other = min(found["diffract"]["seconds"]) if "diffract" in found else found["diffract_recorded"]
        floor = f", bare NumPy {min(found['bare_numpy']['seconds']):.2f} s" if "bare_numpy" in found else ""
        print(f"{name}: {own:.2f} s for {found['ours']['matrices']} matrices, diffract-core {other:.1f} s{floor}")
        print(f"  {other / own:.0f} times as fast; fields not here yet: {', '.join(found['lacking']) or 'none'}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1), encoding="utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
