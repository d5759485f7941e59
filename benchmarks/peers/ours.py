"""This package's side of each comparison; every function returns figures as a flat mapping."""

from __future__ import annotations

import contextlib
import math
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads import ONE_PASS, SPECTRAL, Weights, apparent_size, matrices

Figures = dict[str, Any]
VARIANTS = 9  # of hard_rank: with the 21 scalar fields of a slice they make 30
SCALARS = (
    *ONE_PASS,
    *("greater_dim", "lower_dim", "aspect_ratio", "max_weights_sval", "min_weights_sval", "esd_max", "esd_min"),
    *("l2_norm", "nuclear_norm", "stable_rank", "effective_rank", "hard_rank"),
)


def timed(call: Callable[..., object], *args: Any, **options: Any) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    call(*args, **options)
    return time.perf_counter() - start


def fresh(scratch: Path) -> Path:
    """Return the path of a store that does not exist."""
    path = scratch / "store.zarr"
    shutil.rmtree(path, ignore_errors=True)
    return path


def warm_up(scratch: Path, fields: tuple[str, ...] = SPECTRAL) -> None:
    """Run a tiny job, so that what is measured after it holds no first import."""
    from diffract_dask import Session

    with Session(str(fresh(scratch))) as session:
        session.models.add(matrices(4, 8, 6), "warm-up")
        session.compute.apply(*fields)


def checkpoint(file: Path, scratch: Path, repeats: int = 7) -> Figures:
    """Add a checkpoint by link and by copy, compute the spectral fields, store them."""
    from diffract_dask import Session

    cold = timed(warm_up, scratch)
    link, apply, copy = [], [], []
    results = 0
    for _ in range(repeats):
        path = fresh(scratch)
        with Session(str(path)) as session:
            link.append(timed(session.models.add, str(file), "model", link=True))
            apply.append(timed(session.compute.apply, *SPECTRAL))
        results = apparent_size(path)
        with Session(str(fresh(scratch))) as session:
            copy.append(timed(session.models.add, str(file), "model"))
    size = file.stat().st_size
    return {"cold": cold, "link": link, "apply": apply, "copy_mb_s": size / min(copy) / 1e6, "results": results}


def one_pass(weights: Weights, scratch: Path, repeats: int = 7) -> Figures:
    """Compute the one-pass fields of arrays in memory: by the session, and by the numerics alone."""
    from diffract_dask import Session, moments

    warm_up(scratch, ONE_PASS)
    apply, bare = [], []
    for _ in range(repeats):
        with Session(profile="ram") as session:
            session.models.add(weights, "model")
            apply.append(timed(session.compute.apply, *ONE_PASS))
        bare.append(timed(lambda: [moments.moments(w) for w in weights.values()]))
    return {"apply": apply, "moments": bare}


def many(weights: Weights, scratch: Path, *, processes: int = 0, repeats: int = 3) -> Figures:
    """Compute the spectral fields of many small slices, on threads or on a cluster of one-thread processes."""
    from diffract_dask import Session

    seconds = []
    blocks = 0
    with cluster(processes) if processes else contextlib.nullcontext():
        warm_up(scratch)
        for _ in range(repeats):
            with Session(str(fresh(scratch))) as session:
                session.models.add(weights, "model")
                plan = session.compute.plan(*SPECTRAL)
                blocks = kernel_blocks(plan)
                seconds.append(timed(session.compute.apply, *SPECTRAL))
    return {"apply": seconds, "kernel_blocks": blocks}


def many_shapes(count: int, shapes: int, seed: int = 0) -> Weights:
    """Return `count` matrices of about 16 × 16 in so many shapes: one block each, if nothing else splits them."""
    rng = np.random.default_rng(seed)
    side = math.ceil(math.sqrt(shapes))
    sizes = [(9 + i // side, 9 + i % side) for i in range(shapes)]
    return {f"layer.{i}.weight": rng.standard_normal(sizes[i % shapes], np.float32) for i in range(count)}


def overhead(scratch: Path, count: int, shapes: int, repeats: int = 7) -> Figures:
    """Compute on many small blocks, so that the engine's own work is most of it; build their graph alone, too."""
    from diffract_dask import Session
    from diffract_dask.graph import blocks

    warm_up(scratch)
    with Session(str(fresh(scratch))) as session:
        session.models.add(many_shapes(count, shapes), "model")
        plan = session.compute.plan(*SPECTRAL)
        keep = {name: step.stored_fields for name, step in plan.steps.items()}
        store = session.store
        build = [timed(lambda: list(blocks(plan, store, token="bench", keep=keep))) for _ in range(repeats)]
        planning = timed(session.compute.plan, *SPECTRAL)
        apply = timed(session.compute.apply, *SPECTRAL)
    return {"build": build, "plan": planning, "apply": apply, "kernel_blocks": kernel_blocks(plan)}


def kernel_blocks(plan: Any) -> int:
    """Return how many kernel × block tasks a plan has."""
    return sum(group.layout.n_blocks(len(group.classes)) * len(group.kernels) for group in plan.groups)


def make_fleet(path: Path, models: int, names: int) -> None:
    """Fill a store with many small models, 30 scalar fields each."""
    from diffract_dask import Session

    with Session(str(path)) as session:
        for i in range(VARIANTS):
            session.compute.variant("hard_rank", f"hard_rank_{i}", rtol=10.0 ** -(i + 2))
        for i in range(models):
            session.models.add(matrices(names, 8, 6, seed=i), f"model-{i}", step=i)
        session.compute.apply(*SCALARS, *(f"hard_rank_{i}" for i in range(VARIANTS)))


def fleet(path: Path) -> Figures:
    """Time what a session does on a store in which everything is computed; meant for a new process."""
    from diffract_dask import Session

    figures: Figures = {}
    fields = (*SCALARS, *(f"hard_rank_{i}" for i in range(VARIANTS)))

    def opened() -> Session:
        session = Session(str(path))
        for i in range(VARIANTS):
            session.compute.variant("hard_rank", f"hard_rank_{i}", rtol=10.0 ** -(i + 2))
        return session

    opened().results.dataset("frob_norm").load()  # imports
    loads, applies = [], []
    for _ in range(3):
        session = opened()
        loads.append(timed(lambda: Session(str(path)).results.dataset(*SCALARS).load()))
        applies.append(timed(session.compute.apply, *fields))
    figures["load"], figures["nothing_to_do"] = loads, applies
    figures["results"] = apparent_size(path) - sum(apparent_size(w) for w in path.glob("models/*/weights"))
    rebuilds = []
    for _ in range(3):
        shutil.rmtree(path / "view")
        rebuilds.append(timed(lambda: Session(str(path)).store.refresh_view()))
    figures["rebuild"] = rebuilds
    return figures


def adding(scratch: Path, models: int, names: int) -> Figures:
    """Add many small models one after another; the median of ten adds early and of the last ten."""
    from diffract_dask import Session

    weights = matrices(names, 8, 6)
    seconds = []
    with Session(str(fresh(scratch))) as session:
        for i in range(models):
            weights["layer.0.weight"] += 1  # no two are equal
            seconds.append(timed(session.models.add, weights, f"model-{i}", step=i))
    return {"early": statistics.median(seconds[5:15]), "late": statistics.median(seconds[-10:])}


def large(file: Path, scratch: Path) -> Figures:
    """Compute the full spectrum of one linked matrix that is read in spans."""
    from diffract_dask import Session

    with Session(str(fresh(scratch))) as session:
        session.models.add(str(file), "model", link=True)
        plan = session.compute.plan("weights_svals")
        seconds = timed(session.compute.apply, "weights_svals")
        svals = session.results.dataset("weights_svals")["weights_svals"].to_numpy()
    return {
        "apply": seconds,
        "projected": plan.peak_bytes,
        "finite": bool(np.isfinite(svals).all()),
        "largest": float(np.nanmax(svals)),
    }


@contextlib.contextmanager
def cluster(processes: int) -> Iterator[Any]:
    """Yield a client of a local cluster of processes with one thread each."""
    from distributed import Client, LocalCluster

    with (
        warnings.catch_warnings(),
        LocalCluster(processes, threads_per_worker=1, processes=True, dashboard_address=None) as workers,
        Client(workers) as client,
    ):
        warnings.simplefilter("ignore")
        yield client
