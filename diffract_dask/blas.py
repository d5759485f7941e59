"""BLAS and LAPACK in place and without the interpreter lock, and the number of threads they use.

SciPy's own wrappers hold the lock while they run, so that two threads compute one after the other; NumPy's release
it but copy their argument. Both matter for a k × k matrix that takes most of the memory. Here the routines are
called through the C pointers that SciPy publishes for other compilers (``cython_blas.__pyx_capi__``): ctypes
releases the lock, and the arrays are worked on where they lie.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cython_blas, cython_lapack
from threadpoolctl import ThreadpoolController

from diffract_dask.errors import MatrixError

__all__ = ["Array", "add_gram", "add_rows", "blas_threads", "eigenvalues", "svdvals", "work_bytes"]

Array = NDArray[np.float64]

PANEL = 32
"""Columns that the blocked QR works on at a time."""

_C_TYPES = {"char *": ctypes.c_char_p, "int *": ctypes.c_void_p, "d *": ctypes.c_void_p}


@cache
def _routine(name: str) -> Callable[..., None]:
    """Return the Fortran routine `name`; ints, floats, bytes and arrays are passed by reference."""
    module = cython_blas if name == "dsyrk" else cython_lapack
    capsule = module.__pyx_capi__[name]
    get_name = ctypes.pythonapi.PyCapsule_GetName
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    signature: bytes = get_name(capsule)
    declared = re.sub(r"__pyx_t_\w*_(\w) \*", r"\1 *", signature.decode())
    try:
        types = [_C_TYPES[argument] for argument in declared[declared.index("(") + 1 : -1].split(", ")]
    except KeyError as error:
        raise ImportError(f"SciPy declares {name} as {declared!r}; expected char, int and double pointers") from error
    function = ctypes.CFUNCTYPE(None, *types)(get_pointer(capsule, signature))

    def call(*arguments: Any) -> None:
        function(*(_reference(argument) for argument in arguments))

    return call


def _reference(argument: Any) -> Any:
    if isinstance(argument, np.ndarray):
        return argument.ctypes.data
    if isinstance(argument, int):
        return ctypes.byref(ctypes.c_int(argument))
    if isinstance(argument, float):
        return ctypes.byref(ctypes.c_double(argument))
    return argument if isinstance(argument, bytes) else ctypes.byref(argument)


def _check(info: ctypes.c_int, name: str, size: int) -> None:
    if info.value:
        raise np.linalg.LinAlgError(f"LAPACK {name} failed on a {size} × {size} matrix (info = {info.value})")


def _check_arrays(matrix: Array, rows: Array | None = None) -> None:
    """Refuse what LAPACK, which sees bare addresses, would read or write out of bounds."""
    k = len(matrix)
    if (
        matrix.shape != (k, k)
        or matrix.dtype != np.float64
        or not (matrix.flags.f_contiguous and matrix.flags.writeable)
    ):
        raise MatrixError(
            f"expected a writable square float64 array in Fortran order, found shape {matrix.shape}, {matrix.dtype}"
        )
    if rows is not None and (rows.ndim != 2 or rows.shape[1] != k or rows.dtype != np.float64):
        raise MatrixError(f"expected rows of {k} float64 values, found shape {rows.shape}, {rows.dtype}")


def add_gram(gram: Array, rows: Array) -> None:
    """Add ``rowsᵀ · rows`` to the lower triangle of `gram` in place.

    Parameters
    ----------
    gram : (k, k) array, Fortran order
    rows : (b, k) array, C or Fortran order
    """
    _check_arrays(gram, rows)
    b, k = rows.shape
    if rows.flags.c_contiguous:
        _routine("dsyrk")(b"L", b"N", k, b, 1.0, rows, k, 1.0, gram, k)
    elif rows.flags.f_contiguous:
        _routine("dsyrk")(b"L", b"T", k, b, 1.0, rows, b, 1.0, gram, k)
    else:
        raise MatrixError("expected contiguous rows; copy them first")


def add_rows(triangle: Array, rows: Array, *, triangular: bool = False) -> None:
    """Replace `triangle` in place by the R factor of itself stacked on `rows`; `rows` is destroyed.

    Parameters
    ----------
    triangle : (k, k) array, Fortran order, upper triangular
    rows : (b, k) array, Fortran order
    triangular : bool
        `rows` is itself k × k upper triangular, which saves two thirds of the work.
    """
    _check_arrays(triangle, rows)
    if not (rows.flags.f_contiguous and rows.flags.writeable):
        raise MatrixError("expected writable rows in Fortran order; copy them first")
    b, k = rows.shape
    panel, info = min(PANEL, k), ctypes.c_int()
    factors, work = np.empty(panel * k), np.empty(panel * k)
    order = k if triangular else 0
    _routine("dtpqrt")(b, k, order, panel, triangle, k, rows, b, factors, panel, work, info)
    _check(info, "dtpqrt", k)


def eigenvalues(matrix: Array) -> Array:
    """Return the eigenvalues, ascending, of a symmetric matrix given by its lower triangle, which is destroyed.

    Parameters
    ----------
    matrix : (k, k) array, Fortran order

    Raises
    ------
    numpy.linalg.LinAlgError
        The iteration did not converge.
    """
    _check_arrays(matrix)
    k, info = len(matrix), ctypes.c_int()
    diagonal, off, tau, work = np.empty(k), np.empty(k), np.empty(k), np.empty(_work_doubles(k))
    _routine("dsytrd")(b"L", k, matrix, k, diagonal, off, tau, work, len(work), info)
    _check(info, "dsytrd", k)
    _routine("dsterf")(k, diagonal, off, info)
    _check(info, "dsterf", k)
    return diagonal


def svdvals(matrix: Array) -> Array:
    """Return the singular values, descending, of a square matrix, which is destroyed.

    Parameters
    ----------
    matrix : (k, k) array, Fortran order

    Raises
    ------
    numpy.linalg.LinAlgError
        The iteration did not converge.
    """
    _check_arrays(matrix)
    k, info = len(matrix), ctypes.c_int()
    values, work, integers, none = np.empty(k), np.empty(_work_doubles(k)), np.empty(8 * k, np.intc), np.empty(1)
    _routine("dgesdd")(b"N", k, k, matrix, k, values, none, 1, none, 1, work, len(work), integers, info)
    _check(info, "dgesdd", k)
    return values


def _work_doubles(k: int) -> int:
    return 80 * k + 64


def work_bytes(k: int) -> int:
    """Return the bytes that the functions of this module need beyond their arguments and OpenBLAS's own buffers."""
    return 8 * (_work_doubles(k) + 8 * k)


@cache
def _libraries() -> tuple[list[Any], list[Any]]:
    """Return the BLAS libraries with one number of threads for all callers, and those with one for each caller."""
    libraries = ThreadpoolController().select(user_api="blas").lib_controllers
    own = [library for library in libraries if getattr(library, "threading_layer", "") == "openmp"]
    return [library for library in libraries if library not in own], own


def _set(library: Any, n: int) -> None:
    # From version 3.7 on threadpoolctl lets one thread at a time change OpenBLAS and ignores the others without a
    # word; which one that is has to be cleared, before so that this call counts, and after so that others can.
    release = getattr(library, "clear_controlling_thread", lambda force: None)
    release(force=True)
    library.set_num_threads(n)
    release(force=True)


_lock = threading.Lock()
_requests: Counter[int] = Counter()
_before: list[int] = []


def _request(n: int, change: int) -> None:
    """Count one request for `n` threads more or less, and bring the shared libraries in line with the smallest."""
    shared, _ = _libraries()
    with _lock:
        held = min(_requests, default=0)
        if not held:
            _before[:] = [library.get_num_threads() for library in shared]
        _requests[n] += change
        if not _requests[n]:
            del _requests[n]
        wanted = min(_requests, default=0)
        if wanted != held:
            for library, original in zip(shared, _before, strict=True):
                _set(library, wanted or original)


@contextmanager
def blas_threads(n: int) -> Iterator[None]:
    """Let BLAS use `n` threads inside the block, process-wide.

    Blocks may nest and may be entered and left by many threads in any order: the smallest of the numbers asked for
    holds, and the original ones come back when the last block is left. (Where BLAS runs on OpenMP the number belongs
    to the calling thread, and only this thread's blocks count.)

    Examples
    --------
    >>> with blas_threads(1):
    ...     norms = np.linalg.norm(np.eye(3))
    """
    _, own = _libraries()
    _request(n, 1)
    mine = [library.get_num_threads() for library in own]
    for library in own:
        library.set_num_threads(n)
    try:
        yield
    finally:
        for library, original in zip(own, mine, strict=True):
            library.set_num_threads(original)
        _request(n, -1)
