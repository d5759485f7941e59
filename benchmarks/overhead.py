"""What the engine takes beside the work: ``python -m benchmarks.overhead``.

Bare kernels are called on all slices of a size at once, in memory, in this process. ``compute.apply`` does the same for
a store on disk; what it takes more is planning, tasks, committing, and what of the reading is not hidden behind the
work. Reading alone is shown beside it, and not subtracted, for the two overlap.
Bare kernels run on as many threads as there are workers, each with its share of the slices and one BLAS thread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask
import numpy as np

from benchmarks import machine
from benchmarks.workloads import matrices
from diffract_dask import Session
from diffract_dask.blas import blas_threads
from diffract_dask.kernel import WEIGHTS

FOLDER = Path(__file__).resolve().parent
FIELDS = ("frob_norm", "stable_rank", "effective_rank")
SIZES = {16: (100, 1000, 10_000), 384: (20, 100), 1024: (4, 12)}
TINY = {16: (3,)}
WORKERS = 2
Figures = dict[str, Any]


@contextlib.contextmanager
def on_threads() -> Iterator[None]:
    """Run on threads of this process."""
    with dask.config.set({"diffract_dask.threads": WORKERS}):
        yield


@contextlib.contextmanager
def on_a_cluster() -> Iterator[None]:
    """Run on processes of one thread each."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster),
    ):
        yield


PLACES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "threads": on_threads,
    "cluster": on_a_cluster,
}


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def bare(session: Session, weights: np.ndarray[Any, Any]) -> float:
    """Return the seconds that the kernels of the fields take on a stack of slices in memory."""
    kernels = session.compute.plan(*FIELDS).kernels

    def run(part: np.ndarray[Any, Any]) -> None:
        known: dict[str, Any] = {WEIGHTS: part}
        for kernel in kernels:
            made = kernel.function(*(known[name] for name in kernel.inputs), **kernel.defaults)
            known.update(zip(kernel.outputs, made if len(kernel.outputs) > 1 else (made,), strict=True))

    parts = np.array_split(weights, WORKERS)
    with blas_threads(1), ThreadPoolExecutor(WORKERS) as pool:
        return seconds(lambda: list(pool.map(run, parts)))


def measure(size: int, count: int, repeats: int) -> Figures:
    """Return the best times of one size and number of slices where the process runs now."""
    weights = matrices(count, size, size)
    stack = np.stack(list(weights.values()))
    found: dict[str, list[float]] = {"apply": [], "bare": [], "reading": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder, Session(f"{folder}/store.zarr") as session:
            session.models.add(weights, "model")
            found["bare"].append(bare(session, stack))
            slices = session.store.slices("model", np.arange(count))
            found["reading"].append(seconds(slices.load))
            found["apply"].append(seconds(lambda: session.compute.apply(*FIELDS)))
    best = {name: min(times) for name, times in found.items()}
    more = best["apply"] - best["bare"]
    return {"size": size, "count": count, **best, "per_slice": more / count, "share": more / best["apply"]}


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="of which the best counts (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a few small slices on threads")
    parser.add_argument("--out", type=Path, default=FOLDER / "results" / "overhead.json")
    args = parser.parse_args(argv)
    facts, rows = machine.facts(), []
    print("| where | slices | apply | bare kernels | reading | overhead per slice | share |")
    print("|---|---|---|---|---|---|---|")
    for place in ("threads",) if args.tiny else PLACES:
        with PLACES[place]():
            for size, counts in (TINY if args.tiny else SIZES).items():
                for count in counts:
                    row = {"where": place, **measure(size, count, args.repeats)}
                    rows.append(row)
                    times = " | ".join(f"{row[name]:.3f} s" for name in ("apply", "bare", "reading"))
                    more = f"{row['per_slice'] * 1e3:.3f} ms | {row['share']:.0%}"
                    print(f"| {place} | {count} × {size}² | {times} | {more} |", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1), encoding="utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
