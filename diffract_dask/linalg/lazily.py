"""Dask arrays: graphs of folds within a budget, and of functions of small matrices."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from diffract_dask import workers
from diffract_dask.blas import Array
from diffract_dask.errors import MatrixError, OverBudgetError
from diffract_dask.linalg import pieces
from diffract_dask.linalg.folding import BLOCK, fold, pick
from diffract_dask.linalg.randomised import PassStream, leading_of
from diffract_dask.linalg.routes import CODE, unscaled
from diffract_dask.linalg.triangles import TriangleStream, directions, inverse, project, solve
from diffract_dask.linalg.vectors import fix_signs
from diffract_dask.moments import moments as moments_of

Budget = int | str | None


def is_lazy(w: object) -> TypeGuard[Any]:
    """Return whether `w` is a Dask array, without importing Dask."""
    module = sys.modules.get("dask.array.core")
    return module is not None and isinstance(w, module.Array)


def checked(w: Any) -> Any:
    """Return a Dask array if it is one real matrix of known size; MatrixError otherwise."""
    if w.ndim != 2:
        raise MatrixError(f"expected one matrix, found shape {w.shape}; index or reshape to two dimensions")
    if any(np.isnan(size) for size in w.shape):
        raise MatrixError(f"expected known chunk sizes, found shape {w.shape}; call compute_chunk_sizes() first")
    if w.dtype.kind not in "fiub" and not np.can_cast(w.dtype, np.float64):
        raise MatrixError(f"expected real numbers, found dtype {w.dtype}; convert first, for example w.real")
    return w


def in_one_chunk(array: NDArray[Any]) -> Any:
    """Return a NumPy array as a Dask array."""
    import dask.array as da

    return da.from_array(array, chunks=array.shape)  # type: ignore[no-untyped-call]


def tall_shape(w: Any) -> tuple[int, int]:
    """Return the shape of a Dask array, if it is one real matrix, the longer side first."""
    m, n = checked(w).shape
    return max(m, n), min(m, n)


def _tall(w: Any) -> Any:
    return w if w.shape[0] >= w.shape[1] else w.T


def _limit(budget: Budget) -> tuple[int, int]:
    """Return the bytes that tasks may use at once, and how many run at once."""
    have = workers.resources(None if budget is None else {"memory-budget": budget})
    return have.budget, have.workers


def budget_of(budget: Budget) -> int:
    """Return the bytes that tasks may use at once."""
    return _limit(budget)[0]


def folded(
    arrays: Sequence[Any], stream: Any, shape: tuple[int, ...], budget: Budget, what: str, params: Any = None,
    given: Any = None,
) -> tuple[str, Any]:  # fmt: skip
    """Return the task that folds `stream` over the arrays, in as many spans as the budget allows."""
    limit, spans = _limit(budget)
    dtype = arrays[0].dtype
    state, finish = stream.workspace(shape, dtype)
    axis = int(len(arrays) == 1 and arrays[0].shape[0] < arrays[0].shape[1])
    row = sum(array.shape[1 - axis] * array.dtype.itemsize for array in arrays)
    # a block, the one made meanwhile, and the chunks that the latter is put together from
    buffers = 3 * min(max(BLOCK, pieces.MIN_ROWS * row), max(arrays[0].chunks[axis], default=0) * row)
    while spans > 1 and max(spans * (state + buffers), state + finish) > limit:
        spans -= 1
    peak = max(state + buffers, state + finish)
    if peak > limit:
        raise OverBudgetError(
            f"{what} of a matrix {' × '.join(map(str, arrays[0].shape))} {dtype} needs {workers.show(peak)}; the "
            f"budget is {workers.show(limit)}. Give budget=, raise the setting memory-budget, rechunk to fewer rows, "
            "or take the leading part with leading_svd"
        )
    return fold(arrays, stream, shape, spans=spans, params=params, given=given)


def check_whole(what: str, w: Any, workspace: int, budget: Budget) -> None:
    """Raise OverBudgetError if a matrix cannot be worked on whole."""
    limit, _ = _limit(budget)
    need = workspace + w.nbytes
    if need > limit:
        raise OverBudgetError(
            f"{what} of a matrix {' × '.join(map(str, w.shape))} {w.dtype} needs {workers.show(need)} in one task; the "
            f"budget is {workers.show(limit)}. Take method='tsqr', give budget=, or raise the setting memory-budget"
        )


def error_and_route(name: str, graph: Any) -> tuple[Any, Any]:
    """Return the second and the third result of a fold."""
    return pick(name, graph, 1, (), np.float64), pick(name, graph, 2, (), np.int8)


def stacked(
    function: Callable[..., Any], w: Any, outputs: str, sizes: tuple[int, ...], **options: Any
) -> Sequence[Any]:
    """Return the results of a function of stacks of matrices, in chunks of whole matrices."""
    import dask.array as da

    count = outputs.count("(")
    named = dict(zip(("k", "p", "q"), sizes, strict=False))
    kinds = [np.float64] * (count - 1) + [np.int8 if function is not moments_of else np.float64]
    made: Sequence[Any] = da.apply_gufunc(  # type: ignore[no-untyped-call]
        function, f"(i,j)->{outputs}", w, output_dtypes=kinds, output_sizes=named, allow_rechunk=True, **options
    )
    return made


def whole_matrices(function: Callable[..., Any], w: Any, inner: tuple[int, ...], dtype: Any, **options: Any) -> Any:
    """Return a function of stacks of matrices in chunks of whole ones, which gives an array `inner` of each."""
    import dask.array as da

    whole = w.rechunk({w.ndim - 2: -1, w.ndim - 1: -1})
    chunks = (*whole.chunks[:-2], *((size,) for size in inner))
    gone = [axis for axis in (w.ndim - 2, w.ndim - 1) if not inner]
    meta = np.empty((0,) * len(chunks), dtype)
    return da.map_blocks(  # type: ignore[no-untyped-call]
        function, whole, dtype=dtype, chunks=chunks, drop_axis=gone, meta=meta, **options
    )


def several(
    function: Callable[..., Any], shapes: Sequence[tuple[int, ...]], *arrays: Any, route: bool = False, **options: Any
) -> list[Any]:
    """Return the results of a function of arrays, each in one chunk, made in one task; the last one may be a route."""
    from dask._task_spec import Task, TaskRef
    from dask.base import tokenize
    from dask.highlevelgraph import HighLevelGraph

    whole = [array.rechunk(array.shape) for array in arrays]
    name = f"{function.__name__.strip('_')}-{tokenize([array.name for array in whole], options)}"
    refs = [TaskRef((array.name, *(0 for _ in array.shape))) for array in whole]
    layer: dict[Any, Any] = {name: Task(name, _apply, function, options, *refs)}
    graph = HighLevelGraph.from_collections(name, layer, dependencies=whole)
    kinds = [np.float64] * (len(shapes) - 1) + [np.int8 if route else np.float64]
    return [pick(name, graph, i, shape, kind) for i, (shape, kind) in enumerate(zip(shapes, kinds, strict=True))]


def long_vectors(w: Any, shape: tuple[int, int], budget: Budget) -> tuple[Any, list[Any], Any, Any, Any]:
    """Return the singular vectors on the longer side, the factors of R, R itself, its error and its route."""
    k = shape[1]
    name, graph = folded([w], TriangleStream(), shape, budget, "tsqr")
    triangle = pick(name, graph, 0, (k, k), np.float64)
    shapes = ((k, k), (k,), (k, k), (k,), (k, k))
    factors = several(_factors, shapes, triangle, of=shape)
    images = _images(_tall(w), factors[4], factors[1])
    second, other = folded([images], TriangleStream(), shape, budget, "svd")
    long = _by_rows(solve, images, pick(second, other, 0, (k, k), np.float64))
    return long, factors, triangle, *error_and_route(name, graph)


def _factors(r: Array, of: tuple[int, int]) -> tuple[Array, ...]:
    """Return left vectors, values and right vectors of R with signs fixed, the signs, and what gives U."""
    left, values, right = directions(r)
    signs = _signs(right)
    return left, values, right * signs, signs, inverse(right, values, of)


def _signs(v: Array) -> Array:
    """Return what each column is multiplied by so that its entry of largest magnitude is positive."""
    signs = np.ones((1, v.shape[1]))
    fix_signs(signs, v.copy())
    return np.ravel(signs)


def _images(tall: Any, scaled: Any, values: Any) -> Any:
    return _by_rows(project, tall, scaled, values[None, :])


def _by_rows(function: Callable[..., Array], rows: Any, matrix: Any, *others: Any) -> Any:
    """Return a function of each block of rows and of small arrays, which makes as many rows."""
    import dask.array as da

    whole = rows.rechunk({1: -1})
    chunks = (whole.chunks[0], (matrix.shape[1],))
    return da.map_blocks(  # type: ignore[no-untyped-call]
        function, whole, matrix, *others, dtype=np.float64, chunks=chunks, meta=np.empty((0, 0))
    )


def leading_now(tall: Any, rank: int, oversample: int, passes: int, seed: int) -> tuple[Any, ...]:
    """Return vectors on the longer side, values, vectors on the shorter one, errors and route."""
    with np.errstate(all="ignore"):
        found = leading_of(lambda: iter([tall]), tall.shape, tall.dtype, rank, oversample, passes, seed, rtol=0.0)
        errors = unscaled(found.errors, found.exponent)
        values = np.ldexp(found.values, found.exponent)
        values, short, errors, scaled, route = _leading(values, found.vectors, errors, tall.shape, rank)
        long = project(tall, scaled, values)[:, ::-1]
    return long, values, short, errors, route


def leading_lazily(
    w: Any, shape: tuple[int, int], rank: int, oversample: int, passes: int, seed: int, budget: Budget
) -> tuple[Any, ...]:
    """Return the same as Dask arrays, from so many folds one after another."""
    k = shape[1]
    size = min(k, rank + oversample)
    basis: Any = None
    for _ in range(passes):
        name, graph = folded([w], PassStream(size, seed), shape, budget, "leading_svd", given=basis)
        basis = pick(name, graph, 3, (k, size), np.float64)
    made = [pick(name, graph, i, shape, np.float64) for i, shape in enumerate(((size,), (k, size), (size,)))]
    shapes = ((rank,), (k, rank), (rank,), (k, rank), ())
    values, short, errors, scaled, route = several(_leading, shapes, *made, route=True, of=shape, rank=rank)
    return _images(_tall(w), scaled, values)[:, ::-1], values, short, errors, route


def _leading(values: Array, vectors: Array, errors: Array, of: tuple[int, int], rank: int) -> tuple[Any, ...]:
    """Return the leading values, vectors with signs fixed, errors, what gives the other vectors, and the route."""
    values, errors, vectors = values[-rank:], errors[-rank:], vectors[:, -rank:]
    if not np.isfinite(errors).all():
        return values, vectors, errors, vectors, np.int8(0)
    short = vectors * _signs(vectors)
    return values, short, errors, inverse(short, values, of), np.int8(CODE["leading"])


def _apply(function: Callable[..., Any], options: dict[str, Any], *arrays: Any) -> Any:
    with np.errstate(all="ignore"):
        return function(*arrays, **options)
