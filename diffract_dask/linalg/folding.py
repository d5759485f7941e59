"""Dask arrays read in spans of rows: one task per span, which holds one block at a time and one state.

A graph with a task per block and a tree of partial results holds as many k × k matrices as the scheduler happens to
run ahead. Here a span's task makes its blocks itself, one after another, from the part of the array's own graph that
only this span needs; what several spans need (an array's mean, say) stays a task of its own.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from diffract_dask import blas
from diffract_dask.linalg import pieces

__all__ = ["Span", "fold", "pick", "row_blocks"]

Key = Any
Grid = list[list[Key]]

BLOCK = 16 << 20
"""Bytes of a block of rows, in the array's own dtype, above which it is read in parts."""


@dataclass(frozen=True)
class Span:
    """Part of the graph of one or more arrays that makes some blocks of their rows.

    Attributes
    ----------
    nodes : dict
        Tasks by key, made nowhere else.
    blocks : list of tuple of Grid
        Keys of the chunks of each block, for each array.
    wide : bool
        Blocks are panels of columns, which are transposed.
    """

    nodes: dict[Key, Any]
    blocks: list[tuple[Grid, ...]]
    wide: bool

    def read(self, known: Mapping[Key, Any]) -> Iterator[Any]:
        """Yield the blocks, the next one being made meanwhile; `known` are the results of other tasks."""
        wanted = Counter(key for block in self.blocks for grid in block for row in grid for key in row)
        wanted.update(chain.from_iterable(node.dependencies for node in self.nodes.values()))
        made: dict[Key, Any] = {}

        def take(key: Key) -> Any:
            value = known[key] if key in known else made[key]
            wanted[key] -= 1
            if not wanted[key]:
                made.pop(key, None)
            return value

        def make(key: Key) -> Any:
            stack = [key]
            while stack:
                top = stack[-1]
                if top in known or top in made:
                    stack.pop()
                    continue
                missing = [d for d in self.nodes[top].dependencies if d not in known and d not in made]
                stack += missing
                if not missing:
                    node = self.nodes[stack.pop()]
                    made[top] = node({dependency: take(dependency) for dependency in node.dependencies})
            return take(key)

        def block(index: int) -> Any:
            grids = [[[np.asarray(make(key)) for key in row] for row in grid] for grid in self.blocks[index]]
            arrays = [grid[0][0] if len(grid) == len(grid[0]) == 1 else np.block(grid) for grid in grids]
            if len(arrays) > 1:
                return tuple(arrays)
            return arrays[0].T if self.wide else arrays[0]

        with ThreadPoolExecutor(1, "diffract-dask-read") as ahead:
            pending = ahead.submit(block, 0) if self.blocks else None
            for following in range(1, len(self.blocks) + 1):
                assert pending is not None
                current = pending.result()
                pending = ahead.submit(block, following) if following < len(self.blocks) else None
                yield current


def row_blocks(arrays: Sequence[Any], wide: bool) -> tuple[dict[Key, Any], list[tuple[Grid, ...]]]:
    """Return the graph of `arrays`, chunked alike along the long axis, and the chunks of each block of that axis."""
    axis = int(wide)
    width = max(sum(array.shape[1 - axis] * array.dtype.itemsize for array in arrays), 1)
    graph: dict[Key, Any] = {}
    blocks: list[tuple[Grid, ...]] = []
    sizes = arrays[0].chunks[axis]
    if max(sizes, default=0) * width > BLOCK:
        step = max(pieces.MIN_ROWS, BLOCK // width)
        start = 0
        for size in sizes:
            for first in range(start, start + size, step):
                part = slice(first, min(first + step, start + size))
                parts = [array[:, part] if wide else array[part] for array in arrays]
                for made in parts:
                    graph |= _optimised(made)
                blocks.append(tuple(made.__dask_keys__() for made in parts))
            start += size
        return graph, blocks
    keys = [array.__dask_keys__() for array in arrays]
    for array in arrays:
        graph |= _optimised(array)

    def grids(start: int, stop: int) -> tuple[Grid, ...]:
        return tuple([row[start:stop] for row in own] if wide else own[start:stop] for own in keys)

    start, held = 0, 0
    for i, size in enumerate(sizes):
        if held and (held + size) * width > pieces.PIECE:
            blocks.append(grids(start, i))
            start, held = i, 0
        held += size
    if sizes:
        blocks.append(grids(start, len(sizes)))
    return graph, blocks


def _optimised(array: Any) -> dict[Key, Any]:
    """Return an array's optimised graph; what a client holds already stays as it is, a reference."""
    from dask._task_spec import TaskRef, convert_legacy_graph
    from dask.core import flatten

    raw = dict(array.__dask_optimize__(array.dask, array.__dask_keys__()))
    graph = convert_legacy_graph({key: value for key, value in raw.items() if not isinstance(value, TaskRef)})
    wanted = (
        set(flatten(array.__dask_keys__())).union(  # type: ignore[no-untyped-call]
            *map(_needs, graph.values())
        )
        - graph.keys()
    )
    return {**graph, **{key: array.dask[key] for key in wanted}}


def _needs(node: Any) -> frozenset[Key]:
    """Return the keys that a node of a graph is made of; none for a reference."""
    return getattr(node, "dependencies", frozenset())


def _shared(graph: Mapping[Key, Any], blocks: Sequence[tuple[Grid, ...]], edges: Sequence[int]) -> set[Key]:
    """Return the keys that stay tasks of their own: data, and what several spans, or all blocks, need."""
    from dask._task_spec import Alias, Task

    first: dict[Key, int] = {}
    last: dict[Key, int] = {}
    span = np.searchsorted(edges, np.arange(len(blocks)), side="right")
    for i, block in enumerate(blocks):
        for key in chain.from_iterable(row for grid in block for row in grid):
            first.setdefault(key, i)
            last[key] = i
    outside: set[Key] = set()
    for key in _dependents_first(graph):
        if key not in first:
            continue
        everywhere = len(blocks) > 1 and (first[key], last[key]) == (0, len(blocks) - 1)
        if everywhere or span[first[key]] != span[last[key]] or not isinstance(graph[key], (Task, Alias)):
            outside.add(key)
            continue
        for dependency in graph[key].dependencies:
            first[dependency] = min(first.get(dependency, len(blocks)), first[key])
            last[dependency] = max(last.get(dependency, -1), last[key])
    return outside


def _dependents_first(graph: Mapping[Key, Any]) -> list[Key]:
    waiting = Counter(chain.from_iterable(map(_needs, graph.values())))
    ready = [key for key in graph if not waiting[key]]
    order: list[Key] = []
    while ready:
        key = ready.pop()
        order.append(key)
        for dependency in _needs(graph[key]):
            waiting[dependency] -= 1
            if not waiting[dependency]:
                ready.append(dependency)
    return order


def _closure(graph: Mapping[Key, Any], keys: set[Key], stop: set[Key]) -> set[Key]:
    """Return `keys` and all that they are made of, down to `stop`."""
    found: set[Key] = set()
    stack = list(keys)
    while stack:
        key = stack.pop()
        if key not in found:
            found.add(key)
            stack += [d for d in _needs(graph[key]) if d not in stop and d not in found]
    return found


def fold(
    arrays: Sequence[Any],
    stream: Any,
    shape: tuple[int, ...],
    *,
    spans: int,
    params: Mapping[str, Any] | None = None,
    given: Any = None,
) -> tuple[str, Any]:
    """Return the name and the graph of a task that gives ``stream.finish`` over the rows of `arrays`.

    Parameters
    ----------
    arrays : sequence of dask.array.Array
        Their rows chunked alike; blocks are tuples where there are several. A single one may be wide.
    stream : Streamed
    shape : tuple
        Passed to ``stream.start``.
    spans : int
        Tasks at once at most.
    given : dask.array.Array, optional
        In one chunk, which ``stream.start`` takes, too.
    """
    from dask._task_spec import Task, TaskRef
    from dask.base import tokenize
    from dask.highlevelgraph import HighLevelGraph

    wide = len(arrays) == 1 and arrays[0].shape[0] < arrays[0].shape[1]
    graph, blocks = row_blocks(arrays, wide)
    spans = max(1, min(spans, len(blocks)))
    edges = [round(len(blocks) * i / spans) for i in range(1, spans)]
    outside = _shared(graph, blocks, edges)
    dtype = arrays[0].dtype
    how = type(stream).__name__, getattr(stream, "__dict__", {}), shape, spans, dict(params or {})
    token = tokenize([array.name for array in arrays], how, given is not None and given.name)
    name = f"{type(stream).__name__.removesuffix('Stream').lower()}-{token}"
    basis = [] if given is None else [TaskRef((given.name, *(0 for _ in given.shape)))]
    layer: dict[Key, Any] = {}
    parts: list[Span] = []
    needed: list[list[Key]] = []
    merged: Any = None
    for number, (start, stop) in enumerate(zip([0, *edges], [*edges, len(blocks)], strict=True)):
        mine = blocks[start:stop]
        keys = {key for block in mine for grid in block for row in grid for key in row}
        nodes = _closure(graph, keys - outside, outside)
        parts.append(Span({key: graph[key] for key in nodes}, mine, wide))
        uses = chain(keys, chain.from_iterable(_needs(graph[key]) for key in nodes))
        needed.append(sorted(set(uses) & outside, key=str))
        key = (f"{name}-span", number)
        refs = [TaskRef(other) for other in needed[-1]]
        layer[key] = Task(key, _span, stream, parts[-1], shape, dtype, spans, needed[-1], len(basis), *basis, *refs)
        if merged is not None:
            joined = (f"{name}-merge", number)
            layer[joined] = Task(joined, _merge, stream, TaskRef(merged), TaskRef(key))
            key = joined
        merged = key
    every = sorted(set(chain.from_iterable(needed)), key=str)
    refs = [TaskRef(other) for other in every]
    layer[name] = Task(name, _finish, stream, parts, dict(params or {}), every, TaskRef(merged), *refs)
    # What stays outside are tasks of the arrays' own graphs, as they are there: fused copies would run twice.
    known = [*(arrays if outside else ()), *([] if given is None else [given])]
    return name, HighLevelGraph.from_collections(name, layer, dependencies=known)


def pick(name: str, graph: Any, index: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return one of the results of the task `name` as a Dask array in one chunk."""
    import dask.array as da
    from dask._task_spec import Task, TaskRef
    from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

    own = f"{name}-{index}"
    key = (own, *(0 for _ in shape))
    layer = MaterializedLayer({key: Task(key, _item, index, TaskRef(name))})
    whole = HighLevelGraph({**graph.layers, own: layer}, {**graph.dependencies, own: {name}})
    return da.Array(whole, own, tuple((size,) for size in shape), dtype)  # type: ignore[no-untyped-call]


def _item(index: int, results: Sequence[Any]) -> Any:
    return results[index]


def _span(
    stream: Any,
    part: Span,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    spans: int,
    names: list[Key],
    given: int,
    *values: Any,
) -> Any:
    state = stream.start(shape, dtype, *values[:given])
    with blas.blas_threads(1) if spans > 1 else contextlib.nullcontext():
        for block in part.read(dict(zip(names, values[given:], strict=True))):
            state = stream.update(state, block)
    return _Once([state])


@dataclass(frozen=True)
class _Once:
    """A state that is worked on in place, and so can be taken once."""

    held: list[Any]

    def take(self) -> Any:
        try:
            return self.held.pop()
        except IndexError:
            raise RuntimeError(
                "a state was to be used twice: an optimisation copied a task of this graph; compute all results in one "
                "call of dask.compute, without optimising them one by one before"
            ) from None


def _merge(stream: Any, first: _Once, second: _Once) -> _Once:
    return _Once([stream.merge(first.take(), second.take())])


def _finish(
    stream: Any, parts: list[Span], params: dict[str, Any], names: list[Key], state: _Once, *values: Any
) -> tuple[Any, ...]:
    known = dict(zip(names, values, strict=True))

    def reread() -> Iterator[NDArray[Any]]:
        return chain.from_iterable(part.read(known) for part in parts)

    finish = cast(Callable[..., tuple[Any, ...]], stream.finish)
    return finish(state.take(), reread, params)
