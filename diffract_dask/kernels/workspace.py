"""Bytes of temporary arrays that kernels make, as the plan adds them up."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Workspace", "scalars", "spectra"]

Workspace = Callable[[int, int, int, int], int]

_FIXED = 64 * 1024  # buffers in which NumPy casts and broadcasts, array headers, small results


def scalars(count: int) -> Workspace:
    """Return the workspace of a kernel that makes `count` temporary numbers per slice.

    >>> scalars(2)(1000, 64, 32, 4) - scalars(0)(1000, 64, 32, 4)
    16000
    """

    def workspace(n: int, rows: int, cols: int, itemsize: int) -> int:
        return 8 * n * count + _FIXED

    return workspace


def spectra(count: int) -> Workspace:
    """Return the workspace of a kernel that makes `count` temporary arrays of min(rows, cols) numbers per slice.

    >>> spectra(1)(10, 64, 32, 4) - spectra(0)(10, 64, 32, 4)
    2560
    """

    def workspace(n: int, rows: int, cols: int, itemsize: int) -> int:
        return 8 * n * (count * min(rows, cols) + 4) + _FIXED

    return workspace
