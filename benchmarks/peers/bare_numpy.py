"""The floor: the same arithmetic in plain NumPy, as one would write it in a script, with nothing stored or labelled.

Two threads with one BLAS thread each (``OPENBLAS_NUM_THREADS=1``), except :func:`rows`, whose single loop has all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
WORKERS = 2


def spectrum(w: Array) -> NDArray[np.float64]:
    """Return the singular values of one matrix from its float64 Gram matrix."""
    a = w.astype(np.float64) if w.shape[0] >= w.shape[1] else w.T.astype(np.float64)
    return np.sqrt(np.maximum(np.linalg.eigvalsh(a.T @ a), 0.0))


def metrics(w: Array) -> tuple[float, ...]:
    """Return frob_norm, l2_norm, nuclear_norm, stable_rank, effective_rank, hard_rank, esd_max and esd_min."""
    s = spectrum(w)
    frob = float(np.sqrt((s**2).sum()))
    p = s[s > 0] / s.sum()
    esd = s**2 / max(w.shape)
    return (
        frob,
        float(s[-1]),
        float(s.sum()),
        float((frob / s[-1]) ** 2),
        float(np.exp(-(p * np.log(p)).sum())),
        float((esd > 1e-5 * esd[-1]).sum()),
        float(esd[-1]),
        float(esd[0]),
    )


def matrices(arrays: Sequence[Array]) -> float:
    """Return the seconds that the metrics of all arrays take on two threads, the largest first."""
    order = sorted(arrays, key=lambda w: -w.size)
    with ThreadPoolExecutor(WORKERS) as pool:
        start = time.perf_counter()
        list(pool.map(metrics, order))
        return time.perf_counter() - start


def batch(stacked: Array) -> float:
    """Return the seconds that the spectra of a stack of small equal matrices take, batched, on two threads."""

    def part(w: Array) -> NDArray[np.float64]:
        a = w.astype(np.float64)
        return np.sqrt(np.maximum(np.linalg.eigvalsh(a.swapaxes(-1, -2) @ a), 0.0))

    with ThreadPoolExecutor(WORKERS) as pool:
        start = time.perf_counter()
        list(pool.map(part, np.array_split(stacked, WORKERS)))
        return time.perf_counter() - start


def frobenius(arrays: Sequence[Array]) -> float:
    """Return the seconds of one ``np.linalg.norm`` per array."""
    start = time.perf_counter()
    for w in arrays:
        np.linalg.norm(w)
    return time.perf_counter() - start


def rows(path: Path, offset: int, shape: tuple[int, int], dtype: str = "<f4", block: int = 2048) -> float:
    """Return the seconds that the spectrum of a matrix in a file takes, read in blocks of rows."""
    m, n = shape
    start = time.perf_counter()
    gram = np.zeros((n, n))
    with path.open("rb") as file:
        file.seek(offset)
        for first in range(0, m, block):
            count = min(block, m - first)
            a = np.fromfile(file, dtype, count * n).reshape(count, n).astype(np.float64)
            gram += a.T @ a
    np.sqrt(np.maximum(np.linalg.eigvalsh(gram), 0.0))
    return time.perf_counter() - start
