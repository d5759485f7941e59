"""Dask arrays with their entries in random places: small ones in one task, large ones through a temporary file."""

from __future__ import annotations

import tempfile
import weakref
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask import shuffle, workers
from diffract_dask.errors import OverBudgetError
from diffract_dask.linalg import folding
from diffract_dask.linalg.lazily import Budget, budget_of, check_whole, checked, tall_shape, whole_matrices

__all__ = ["ScatterStream", "shuffled"]

_IN_USE_ELSEWHERE: list[Scattered] = []
"""Files that other processes were told of: kept until this one ends."""


def shuffled(w: Any, seed: int, budget: Budget) -> Any:
    """Return a Dask array with its entries permuted, see :func:`diffract_dask.linalg.shuffle`."""
    shuffle.check_seed(seed)
    m, n = w.shape[-2:]
    if w.ndim > 2 or m * n <= shuffle.SEQUENTIAL_ENTRIES:
        one = w[(0,) * (w.ndim - 2)] if w.ndim > 2 and w.size else w
        check_whole("shuffle", checked(one) if one.ndim == 2 else one, 2 * one.nbytes, budget)
        return whole_matrices(shuffle.permuted, w, (m, n), w.dtype, seed=seed)
    shape = tall_shape(w)
    need = shuffle.blocks_workspace(shape, w.dtype) + 3 * max(folding.BLOCK, shape[1] * w.dtype.itemsize)
    if need > budget_of(budget):
        raise OverBudgetError(
            f"shuffle of a matrix {m} × {n} {w.dtype} needs {workers.show(need)}; the budget is "
            f"{workers.show(budget_of(budget))}. Give budget=, or raise the setting memory-budget"
        )
    name, graph = folding.fold([w], ScatterStream(seed), shape, spans=1)
    return _rows(name, graph, w)


def _rows(name: str, graph: Any, w: Any) -> Any:
    """Return the array whose blocks of rows (of a wide one, columns) are read from the file of the task `name`."""
    import dask.array as da
    from dask._task_spec import Task, TaskRef
    from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

    (long, k), wide = tall_shape(w), w.shape[0] < w.shape[1]
    step = max(1, folding.BLOCK // (k * w.dtype.itemsize))
    edges = [*range(0, long, step), long]
    own = f"{name}-rows"
    tasks: dict[Any, Any] = {}
    for number, (start, stop) in enumerate(pairwise(edges)):
        key = (own, 0, number) if wide else (own, number, 0)
        tasks[key] = Task(key, _read, TaskRef(name), start, stop, k, wide)
    whole = HighLevelGraph({**graph.layers, own: MaterializedLayer(tasks)}, {**graph.dependencies, own: {name}})
    along = tuple(stop - start for start, stop in pairwise(edges))
    chunks = ((k,), along) if wide else (along, (k,))
    return da.Array(whole, own, chunks, w.dtype)  # type: ignore[no-untyped-call]


def _read(results: tuple[Scattered], start: int, stop: int, k: int, wide: bool) -> NDArray[Any]:
    (scattered,) = results
    rows = scattered.read(start * k, stop * k).reshape(-1, k)
    return rows.T if wide else rows


class Scattered:
    """A file of entries, which is deleted with the last use of it in the process that made it.

    Parameters
    ----------
    size : int
        How many entries there are.
    dtype : dtype
    seed : int
    """

    def __init__(self, size: int, dtype: np.dtype[Any], seed: int) -> None:
        import dask.config

        self.size, self.dtype, self.seed = size, dtype, seed
        directory = dask.config.get("temporary-directory", None)
        with tempfile.NamedTemporaryFile(dir=directory, prefix="diffract-dask-", delete=False) as file:
            self.path = Path(file.name)
        weakref.finalize(self, self.path.unlink, missing_ok=True)
        self.filling = shuffle.Filling(self, size, seed)

    def __getstate__(self) -> dict[str, Any]:
        _IN_USE_ELSEWHERE.append(self)
        return self.__dict__

    def write(self, start: int, entries: NDArray[Any]) -> None:
        """Write entries from place `start` on."""
        with self.path.open("r+b") as file:
            shuffle.Spill(file, self.dtype).write(start, entries)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return the entries of some places."""
        with self.path.open("rb") as file:
            return shuffle.Spill(file, self.dtype).read(start, stop)

    def shuffle(self) -> None:
        """Shuffle each bag in its place."""
        self.filling.close()
        place = 0
        for entries in shuffle.shuffled_bags(self, self.size, self.seed):
            self.write(place, entries)
            place += len(entries)
        del self.filling  # which refers to this object, so that neither would go before a collection of garbage


@dataclass(frozen=True)
class ScatterStream:
    """Puts the entries of a matrix into a file as they come, and shuffles it at the end; for a single span."""

    seed: int

    def start(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> Scattered:
        """Return an empty file."""
        return Scattered(shape[0] * shape[1], dtype, self.seed)

    def update(self, state: Scattered, block: NDArray[Any]) -> Scattered:
        """Return `state` with the entries of a block of rows in it."""
        state.filling.add(block.ravel())
        return state

    def finish(self, state: Scattered, reread: Any, params: Any) -> tuple[Scattered]:
        """Return the shuffled file."""
        state.shuffle()
        return (state,)
