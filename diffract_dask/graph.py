"""A plan as Dask graphs: one layer per kernel, one task per kernel and block of slices.

Tasks pass *bundles* between them: every output of one kernel for one block, with statuses. Layers are made by
hand, because generic blockwise layers are fused and lose the kernels' names in the dashboard.
"""

from __future__ import annotations

import numbers
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import numpy as np
from dask._task_spec import Task, TaskRef
from numpy.typing import NDArray

from diffract_dask.digests import digest_keys
from diffract_dask.errors import ModelNotFoundError, SourceError, StoreChangedError, StoreError
from diffract_dask.fields import MISSING, Field, Status
from diffract_dask.kernel import GIVEN, ROUNDING, SHAPE, WEIGHTS, Kernel, Streamed, own_params
from diffract_dask.linalg import blas_threads
from diffract_dask.memory import field_bytes, stream_of
from diffract_dask.plan import Group, Plan, Step
from diffract_dask.stored import stored_values

if TYPE_CHECKING:
    from diffract_dask.store import Slices, Store

__all__ = ["Block", "Bundle", "Call", "blocks", "build", "outputs_of", "real_numbers"]


_UNREADABLE = (SourceError, StoreError, OSError)

_EXPLAINS = ~np.isin(np.arange(256), (Status.OK, Status.FELL_BACK, Status.INGESTED, MISSING))
"""Which statuses of an input say why an output is NaN."""


class Call(NamedTuple):
    """What a worker needs of a kernel; `dims` are those of its outputs."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dims: tuple[tuple[str, ...], ...]
    params: dict[str, Any]
    batch: bool
    status: Callable[..., Any] | None
    blas_threads: int

    def inner(self, rows: int, cols: int) -> tuple[tuple[int, ...], ...]:
        """Return the shape of each output for one slice of `rows` × `cols`."""
        size = {"sval": min(rows, cols), "row": rows, "col": cols}
        return tuple(tuple(size[dim] for dim in dims) for dims in self.dims)


@dataclass
class Bundle:
    """Outputs of one kernel on one block of `n` slices.

    Attributes
    ----------
    values : dict of str to array
        ``(n,)`` float64 for scalars, ``(n, …)`` for array fields.
    status : dict of str to (n,) uint8 array
    failures : dict of (int, str) to str
        Reason by position in the block and kernel, those of the inputs' kernels included.
    digests : list of str, optional
        Of linked weights that were read in full.
    seconds : dict of str to float
        Time by kernel.
    error : Exception, optional
        Why the weights could not be read. There are no values then, and no failure: nothing is stored.
    """

    n: int
    values: dict[str, NDArray[Any]] = field(default_factory=dict)
    status: dict[str, NDArray[np.uint8]] = field(default_factory=dict)
    failures: dict[tuple[int, str], str] = field(default_factory=dict)
    digests: list[str] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    error: Exception | None = None


@dataclass(eq=False)
class Block:
    """Part of a group that one chain of tasks computes; `key` yields its collected bundle.

    `nbytes` is what this process holds of it: stored inputs that go in, and outputs that come out.
    """

    group: Group
    positions: slice
    key: tuple[str, int]
    tasks: dict[Any, Any]
    seconds: float
    nbytes: int
    alone: bool

    @property
    def classes(self) -> NDArray[np.intp]:
        """Classes of the block's slices."""
        return self.group.classes[self.positions]


def call_of(kernel: Kernel, params: Mapping[str, Any], blas_threads: int = 1) -> Call:
    """Return the picklable call of a kernel."""
    return Call(
        kernel.name,
        kernel.function,
        kernel.inputs,
        tuple(kernel.outputs),
        tuple(f.dims for f in kernel.outputs.values()),
        dict(params),
        kernel.batch,
        kernel.status,
        blas_threads,
    )


def blocks(plan: Plan, store: Store, *, token: str, keep: Mapping[str, Sequence[str]]) -> Iterator[Block]:
    """Yield the blocks of a plan in order, each with its tasks.

    Parameters
    ----------
    token : str
        Makes the names of the kernels' layers unique; those of other layers have one of their own, so that a kernel
        may be called as one of them.
    keep : mapping of str to sequence of str
        Output fields to collect, by kernel name.
    """
    number = 0
    names = _Names(token, uuid4().hex[:8], keep)
    for group in plan.groups:
        for start in range(0, len(group.classes), group.layout.per_block):
            positions = slice(start, min(start + group.layout.per_block, len(group.classes)))
            yield _block(plan, store, group, positions, names, number)
            number += 1


@dataclass(eq=False)
class _Names:
    """What the blocks of one graph have in common: names of layers, the fields to collect, and the kernels' calls."""

    token: str
    inner: str
    keep: Mapping[str, Sequence[str]]
    calls: dict[tuple[str, int], Call] = field(default_factory=dict)
    kept: dict[tuple[str, ...], tuple[dict[str, tuple[str, ...]], list[Field]]] = field(default_factory=dict)

    def call(self, step: Step, threads: int) -> Call:
        """Return the call of a kernel; there are thousands of tasks, and a few calls."""
        key = (step.kernel.name, threads)
        if key not in self.calls:
            self.calls[key] = call_of(step.kernel, step.params, threads)
        return self.calls[key]

    def collected(self, plan: Plan, kernels: tuple[str, ...]) -> tuple[dict[str, tuple[str, ...]], list[Field]]:
        """Return which outputs of some kernels are collected: their names by kernel, and all of them as declared."""
        if kernels not in self.kept:
            kept = {name: tuple(self.keep[name]) for name in kernels if self.keep.get(name)}
            outputs = [plan.registry.field(name) for fields in kept.values() for name in fields]
            self.kept[kernels] = kept, outputs
        return self.kept[kernels]


def build(parts: Sequence[Block]) -> tuple[dict[Any, Any], list[tuple[str, int]]]:
    """Return one graph of several blocks and the keys of their collected bundles."""
    graph: dict[Any, Any] = {}
    for block in parts:
        graph.update(block.tasks)
    return graph, [block.key for block in parts]


def _block(
    plan: Plan,
    store: Store,
    group: Group,
    positions: slice,
    names: _Names,
    number: int,
) -> Block:
    token, inner = names.token, names.inner
    classes = group.classes[positions]
    n = len(classes)
    shape = (n, group.rows, group.cols)
    tasks: dict[Any, Any] = {}
    steps = [plan.steps[name] for name in group.kernels]
    slices, streamed = _weights(plan, store, group, positions, inner, number, tasks)
    where = {WEIGHTS: TaskRef(streamed.get(WEIGHTS, (f"weights-{inner}", number)))} if tasks else {}
    try:
        given = _given(plan, store, group, classes)
    except StoreChangedError as error:
        return _unreadable(group, positions, names, number, error)
    # Many blocks at once: one BLAS thread each. A block that runs alone: all those of its process.
    alone = group.layout.streamed or group.layout.at_once == 1
    threads = max(1, plan.resources.workers // plan.resources.processes) if alone else 1
    for step in steps:
        name = step.kernel.name
        call = names.call(step, threads)
        key = (f"{name}-{token}", number)
        if name in streamed:
            stream = stream_of(step.kernel, group.layout.partial)
            assert stream is not None
            call = call._replace(inputs=tuple(x for x in call.inputs if x != WEIGHTS))
            sources, fixed = _sources(plan, call, where, given, group, n)
            parts = (slices, group.layout.read_bytes, TaskRef(streamed[name]), fixed, tuple(sources))
            tasks[key] = Task(key, finish, call, stream, *parts, *sources.values())
        else:
            sources, fixed = _sources(plan, call, where, given, group, n)
            tasks[key] = Task(key, run, call, shape, fixed, tuple(sources), *sources.values())
        made = TaskRef(key)
        where.update((output, made) for output in call.outputs)
    kept, outputs = names.collected(plan, group.kernels)
    sources_of = [TaskRef((f"{name}-{token}", number)) for name in kept]
    if group.linked and WEIGHTS in where:
        digest = (f"digest-{inner}", number)
        if digest not in tasks:
            tasks[digest] = Task(digest, take_digests, where[WEIGHTS])
        sources_of.append(TaskRef(digest))
    key = (f"collect-{inner}", number)
    tasks[key] = Task(key, collect, n, tuple(kept.values()), *sources_of)
    nbytes = sum(values.nbytes for values, _ in given.values())
    nbytes += n * sum(field_bytes(output, group.rows, group.cols) for output in outputs)
    alone = group.layout.at_once < plan.resources.workers
    return Block(group, positions, key, tasks, group.layout.seconds * n, nbytes, alone)


def _unreadable(group: Group, positions: slice, names: _Names, number: int, error: Exception) -> Block:
    """Return a block that gives an error in place of every kernel's outputs."""
    n = len(group.classes[positions])
    keys = [(f"collect-{names.inner}", number), *((f"{name}-{names.token}", number) for name in group.kernels)]
    return Block(group, positions, keys[0], {key: Task(key, Bundle, n, error=error) for key in keys}, 0.0, 0, False)


def _weights(
    plan: Plan, store: Store, group: Group, positions: slice, token: str, number: int, tasks: dict[Any, Any]
) -> tuple[Slices | None, dict[str, tuple[str, int]]]:
    """Add the tasks that read the weights of a block, if it needs any; return the slices, and the key of each state."""
    if not any(WEIGHTS in plan.steps[name].kernel.inputs for name in group.kernels):
        return None, {}
    key = (f"weights-{token}", number)
    try:
        slices = _slices(plan, store, group, positions)
    except _UNREADABLE as error:
        tasks[key] = Task(key, Bundle, len(group.classes[positions]), error=error)
        return None, {}
    if group.layout.streamed:
        return slices, _streams(plan, group, slices, token, number, tasks)
    tasks[key] = Task(key, load, slices)
    return slices, {}


def _slices(plan: Plan, store: Store, group: Group, positions: slice) -> Slices:
    """Return the weights of a block, to be read by tasks; StoreChangedError if they are not those of the plan."""
    try:
        slices = store.slices(group.model_id, group.rows_in_model[positions])
    except (ModelNotFoundError, IndexError) as error:
        raise StoreChangedError(f"{group.model_id}: erased or replaced after the plan was made") from error
    expected = plan.cells.weights[group.classes[positions]]
    if not slices.linked and not np.array_equal(digest_keys(slices.digests), expected):
        raise StoreChangedError(f"{group.model_id}: replaced after the plan was made")
    return slices.inline() if plan.resources.distributed and store.in_memory else slices


def _sources(
    plan: Plan, call: Call, where: Mapping[str, TaskRef], given: Mapping[str, Any], group: Group, n: int
) -> tuple[dict[str, TaskRef], dict[str, Any]]:
    """Return the inputs of a call that other tasks make, and those that are known already."""
    sources: dict[str, TaskRef] = {}
    fixed: dict[str, Any] = {}
    for name in call.inputs:
        if name == SHAPE:
            fixed[name] = (np.full((n, 2), (group.rows, group.cols), np.int64), np.zeros(n, np.uint8))
        elif name == ROUNDING:
            fixed[name] = (np.full(n, group.rounding), np.zeros(n, np.uint8))
        elif name in where:
            sources[name] = where[name]
        else:
            fixed[name] = given[name]
    return sources, fixed


def _given(plan: Plan, store: Store, group: Group, classes: NDArray[np.intp]) -> dict[str, Any]:
    """Return the stored input fields of a block: (values, status) of the cells that hold them."""
    made = {name for kernel in group.kernels for name in plan.steps[kernel].kernel.outputs}
    wanted = {name for kernel in group.kernels for name in plan.steps[kernel].kernel.inputs} - made - set(GIVEN)
    result: dict[str, Any] = {}
    for name in wanted:
        step = plan.steps[plan.registry.producer(name).name]
        values, status = stored_values(plan, store, name, step.source[classes])
        result[name] = (values, status)
    return result


def _streams(
    plan: Plan, group: Group, slices: Slices, token: str, number: int, tasks: dict[Any, Any]
) -> dict[str, tuple[str, int]]:
    """Add the tasks that read one slice in spans and merge the states; return the key of each state."""
    streams = {
        name: stream_of(plan.steps[name].kernel, group.layout.partial)
        for name in group.kernels
        if WEIGHTS in plan.steps[name].kernel.inputs
    }
    wide, read_bytes = group.cols > group.rows, group.layout.read_bytes
    edges = slices.span_edges(group.layout.spans)
    merged: TaskRef | None = None
    for span, (start, stop) in enumerate(pairwise(edges)):
        key = (f"read-spans-{token}", number, span)
        tasks[key] = Task(key, read_span, slices, dict(streams), start, stop, read_bytes, group.linked and not wide)
        if merged is None:
            merged = TaskRef(key)
        else:
            joined = (f"merge-spans-{token}", number, span)
            tasks[joined] = Task(joined, merge_spans, dict(streams), merged, TaskRef(key))
            merged = TaskRef(joined)
    assert merged is not None
    result: dict[str, tuple[str, int]] = {}
    for name in streams:
        key_of = (f"state-{name}-{token}", number)
        tasks[key_of] = Task(key_of, take_state, name, merged)
        result[name] = key_of
    digest = (f"digest-{token}", number)
    tasks[digest] = Task(digest, streamed_digest, slices, group.linked, wide, merged)
    result[WEIGHTS] = digest
    return result


# Tasks. Each runs on a worker: arrays and plain data in, a bundle out.


def load(slices: Slices) -> Bundle:
    """Read the weights of a block; digests too where they come from a linked file."""
    started = time.perf_counter()
    digests: list[str] | None = None
    n = slices.n
    try:
        if slices.linked:
            weights, digests = slices.load_with_digests()
        else:
            weights = slices.load()
    except _UNREADABLE as error:
        return Bundle(n, error=error)
    seconds = {"reading": time.perf_counter() - started}
    return Bundle(n, {WEIGHTS: weights}, {WEIGHTS: np.zeros(n, np.uint8)}, digests=digests, seconds=seconds)


def run(
    call: Call, shape: tuple[int, int, int], fixed: Mapping[str, Any], names: tuple[str, ...], *bundles: Bundle
) -> Bundle:
    """Run one kernel on a block (n, rows, cols); where a batch raises, slice by slice, so that one fails alone."""
    started = time.perf_counter()
    n, inner = shape[0], call.inner(*shape[1:])
    for source in bundles:
        if source.error is not None:
            return Bundle(n, error=source.error)
    bundle = Bundle(n)
    known = _known(fixed, names, bundles, bundle)
    inputs = [_read_only(known[name][0]) for name in call.inputs]
    with blas_threads(call.blas_threads):
        if call.batch:
            try:
                outputs = _checked(call, inner, n, call.function(*inputs, **own_params(call.params)))
            except KeyboardInterrupt:
                raise
            except BaseException:
                outputs = _one_by_one(call, inner, inputs, bundle)
        else:
            outputs = _one_by_one(call, inner, inputs, bundle)
    bundle.values = dict(zip(call.outputs, outputs, strict=True))
    _fill_status(call, bundle, [known[name] for name in call.inputs])
    bundle.seconds[call.name] = time.perf_counter() - started
    return bundle


def _known(
    fixed: Mapping[str, Any], names: Sequence[str], bundles: Sequence[Bundle], result: Bundle
) -> dict[str, tuple[NDArray[Any], NDArray[np.uint8]]]:
    """Return (values, status) of each input; the failures of their kernels go to `result`.

    The reasons must arrive, also where the outputs of the kernel that raised are not kept.
    """
    known = dict(fixed)
    for name, source in zip(names, bundles, strict=True):
        known[name] = (source.values[name], source.status[name])
        result.failures.update(source.failures)
    return known


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a view that cannot be written to: other kernels get the same input."""
    array = array.view()
    array.flags.writeable = False
    return array


def outputs_of(names: Sequence[str], result: Any) -> tuple[Any, ...]:
    """Return what a kernel gave for each of its outputs, from a value, a tuple or a dict; ValueError otherwise."""
    if isinstance(result, Mapping):
        if set(result) != set(names):
            raise ValueError(f"returned the fields {sorted(map(str, result))}, declared are {sorted(names)}")
        return tuple(result[name] for name in names)
    several = isinstance(result, tuple) or (isinstance(result, list) and len(names) > 1)
    outputs = tuple(result) if several else (result,)
    if len(outputs) != len(names):
        raise ValueError(f"returned {len(outputs)} value{'s' * (len(outputs) != 1)}, declared are {len(names)}")
    return outputs


def real_numbers(name: str, value: Any) -> NDArray[np.float64]:
    """Return what a kernel gave for one output as float64; ValueError for what is no real number."""
    if isinstance(value, np.ma.MaskedArray):
        value = np.ma.filled(value.astype(np.float64), np.nan)
    if isinstance(value, numbers.Real):
        return np.array(float(value))
    array = np.asarray(value)
    if array.dtype.kind in "OSTUcmM":
        hint = "; return nan where the value is not defined" if value is None else ""
        raise ValueError(f"returned {name} as {type(value).__name__} ({array.dtype}), expected real numbers{hint}")
    return array.astype(np.float64, copy=False)


Inner = tuple[tuple[int, ...], ...]
"""Shape of each output for one slice."""


def _checked(call: Call, inner: Inner, n: int | None, result: Any) -> list[NDArray[Any]]:
    """Return a kernel's outputs as arrays of the declared shapes; ValueError otherwise. `n` None: one slice."""
    lead = () if n is None else (n,)
    arrays = []
    for name, expected, value in zip(call.outputs, inner, outputs_of(call.outputs, result), strict=True):
        array = real_numbers(name, value)
        if array.shape != lead + expected:
            raise ValueError(f"returned {name} of shape {array.shape}, expected {lead + expected}")
        arrays.append(array)
    return arrays


def _one_by_one(call: Call, inner: Inner, inputs: Sequence[Any], bundle: Bundle) -> list[NDArray[Any]]:
    outputs = [np.full((bundle.n, *shape), np.nan) for shape in inner]
    for i in range(bundle.n):
        params = own_params(call.params)
        try:
            if call.batch:
                one = call.function(*(x[i : i + 1] for x in inputs), **params)
                made = [x[0] for x in _checked(call, inner, 1, one)]
            else:
                made = _checked(call, inner, None, call.function(*(_plain(x[i]) for x in inputs), **params))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a user's kernel may raise anything, SystemExit too; the other slices go on
            bundle.failures[i, call.name] = f"{type(error).__name__}: {error}"
            continue
        for array, value in zip(outputs, made, strict=True):
            array[i] = value
    return outputs


def _plain(value: Any) -> Any:
    """Return a NumPy scalar as a Python one, so that what people write for floats works."""
    return value.item() if isinstance(value, np.generic) else value


def _fill_status(call: Call, bundle: Bundle, inputs: Sequence[tuple[Any, NDArray[np.uint8]]]) -> None:
    """Say why a value is NaN: the first reason among its inputs, else the kernel's own word, else undefined."""
    n = bundle.n
    own = np.zeros(n, np.uint8)
    if call.status is not None:
        try:
            own = np.asarray(call.status(*bundle.values.values()), np.uint8).reshape(n).copy()
        except Exception as error:  # what cannot be judged is not stored as if it were good
            reason = f"its status: {type(error).__name__}: {error}"
            bundle.failures.update({(i, call.name): reason for i in range(n)})
            bundle.values = {name: np.full_like(values, np.nan) for name, values in bundle.values.items()}
    inherited = np.zeros(n, np.uint8)
    for _, status in inputs:
        if status.any():
            inherited = np.where((inherited == 0) & _EXPLAINS[status], status, inherited)
    failed = np.zeros(n, bool)
    failed[[i for i, kernel in bundle.failures if kernel == call.name]] = True
    non_finite: NDArray[np.bool_] | None = None
    for name, values in bundle.values.items():
        nan = np.isnan(values.reshape(n, -1)).any(axis=1) if values.size else np.zeros(n, bool)
        status = np.where(nan & (inherited != 0), inherited, own).astype(np.uint8)
        silent = nan & (status == 0)
        if silent.any() and WEIGHTS in call.inputs:
            if non_finite is None:
                weights = inputs[call.inputs.index(WEIGHTS)][0]
                non_finite = ~np.isfinite(weights.reshape(n, -1)).all(axis=1)
            status[silent & non_finite] = Status.NON_FINITE
            silent &= status == 0
        status[silent] = Status.UNDEFINED
        status[failed] = Status.FAILED
        bundle.status[name] = status


def read_span(
    slices: Slices, streams: Mapping[str, Streamed], start: int, stop: int, read_size: int, digest: bool
) -> dict[str, Any]:
    """Read one span once and feed every streaming kernel (and the digest) with it."""
    started = time.perf_counter()
    shape = (slices.rows, slices.cols)
    states = {name: stream.start(shape, slices.dtype) for name, stream in streams.items()}
    pieces = slices.digest_pieces(start, stop) if digest else None
    try:
        with blas_threads(1):
            for block in slices.blocks(start, stop, read_size, pieces):
                for name, stream in streams.items():
                    states[name] = stream.update(states[name], block)
    except _UNREADABLE as error:
        return {"error": error}
    hashes = pieces.hashes() if pieces is not None else []
    return {"states": states, "pieces": hashes, "seconds": time.perf_counter() - started}


def take_digests(weights: Bundle) -> Bundle:
    """Return the digests alone, so that what is collected does not hold the weights."""
    return Bundle(weights.n, digests=weights.digests, seconds=weights.seconds, error=weights.error)


def merge_spans(streams: Mapping[str, Streamed], first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Add the states of the next span to those of the spans before it, in place."""
    if "error" in first or "error" in second:
        return first if "error" in first else second
    states = first["states"]
    for name, stream in streams.items():
        states[name] = stream.merge(states[name], second["states"].pop(name))
    return {
        "states": states,
        "pieces": first["pieces"] + second["pieces"],
        "seconds": first["seconds"] + second["seconds"],
    }


def take_state(name: str, merged: dict[str, Any]) -> Any:
    """Return one kernel's merged state, or the error that came instead."""
    return merged["error"] if "error" in merged else merged["states"][name]


def streamed_digest(slices: Slices, linked: bool, wide: bool, merged: dict[str, Any]) -> Bundle:
    """Return the digest of a streamed slice; a wide one is read again, in the order of its bytes."""
    if "error" in merged:
        return Bundle(1, error=merged["error"])
    digests = None
    try:
        if linked:
            digests = [slices.digest()] if wide else [slices.combine(merged["pieces"])]
    except _UNREADABLE as error:
        return Bundle(1, error=error)
    return Bundle(1, digests=digests, seconds={"reading": merged["seconds"]})


def finish(
    call: Call,
    stream: Streamed,
    slices: Slices,
    read_size: int,
    state: Any,
    fixed: Mapping[str, Any],
    names: tuple[str, ...],
    *bundles: Bundle,
) -> Bundle:
    """Return a streaming kernel's outputs from its merged state and its inputs other than the weights."""
    started = time.perf_counter()
    errors = [state] if isinstance(state, Exception) else [source.error for source in bundles if source.error]
    if errors:
        return Bundle(1, error=errors[0])
    bundle = Bundle(1)
    inner = call.inner(slices.rows, slices.cols)
    known = _known(fixed, names, bundles, bundle)
    params = {**own_params(call.params), **{name: known[name][0][0] for name in call.inputs}}

    def reread() -> Iterator[NDArray[Any]]:
        return slices.blocks(0, max(slices.rows, slices.cols), read_size)

    try:
        with blas_threads(call.blas_threads):
            outputs = _checked(call, inner, None, stream.finish(state, reread, params))
    except _UNREADABLE as error:
        return Bundle(1, error=error)
    except Exception as error:  # as in a batch: one slice must not stop the others
        bundle.failures[0, call.name] = f"{type(error).__name__}: {error}"
        outputs = [np.full(shape, np.nan) for shape in inner]
    bundle.values = {name: value[np.newaxis] for name, value in zip(call.outputs, outputs, strict=True)}
    _fill_status(call, bundle, [known[name] for name in call.inputs])
    bundle.seconds[call.name] = time.perf_counter() - started
    return bundle


def collect(n: int, kept: tuple[tuple[str, ...], ...], *bundles: Bundle) -> Bundle:
    """Return what leaves the workers: the fields to keep, statuses, failures, digests, times.

    The bundles beyond those of `kept` bring digests.
    """
    for bundle in bundles:
        if bundle.error is not None:
            return Bundle(n, error=bundle.error)
    result = Bundle(n)
    for names, bundle in zip(kept, bundles, strict=False):
        for name in names:
            result.values[name] = bundle.values[name]
            result.status[name] = bundle.status[name]
    for bundle in bundles:
        result.failures.update(bundle.failures)
        result.digests = bundle.digests or result.digests
        for name, seconds in bundle.seconds.items():
            result.seconds[name] = result.seconds.get(name, 0.0) + seconds
    return result


def batches(parts: Iterator[Block], seconds: float, workers: int, nbytes: int) -> Iterator[list[Block]]:
    """Yield runs of blocks that take about `seconds` on `workers` and `nbytes` here, whole models where they fit.

    A block that may not run beside others (streamed, or over a worker's share of the budget) is a batch of its own.
    """
    batch: list[Block] = []
    total, held = 0.0, 0
    for block in parts:
        same = bool(batch) and batch[-1].group.model_id == block.group.model_id
        full = total + block.seconds > seconds * workers * (2 if same else 1) or held + block.nbytes > nbytes
        if batch and (block.alone or batch[-1].alone or full):
            yield batch
            batch, total, held = [], 0.0, 0
        batch.append(block)
        total += block.seconds
        held += block.nbytes
    if batch:
        yield batch
