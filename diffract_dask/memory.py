"""Memory of a plan: what the workers have, what each form of a kernel needs, and which form fits.

Everything here is arithmetic on shapes; nothing is read or computed. A block's need is its weights, its
outputs and the largest workspace that its kernels state; as many blocks run at once as there are workers.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from diffract_dask import config
from diffract_dask.errors import OverBudgetError
from diffract_dask.fields import Field
from diffract_dask.kernel import WEIGHTS, Kernel

__all__ = ["Layout", "Resources", "available_bytes", "field_bytes", "layout", "resources", "route", "show"]

Call = tuple[Kernel, Mapping[str, Any]]

_BLOCK_BYTES = 32 * 2**20
_BLOCKS_PER_WORKER = 3
_MIN_BLOCK_SECONDS = 0.02
_FLOPS = 2e10  # order of magnitude of one core in float64; only the sizes of blocks and batches follow from it
_BYTES_PER_SECOND = 1e9
_PIECE_BYTES = 2 * 16 * 2**20  # digests of linked slices: a piece of the file, and the one before it
_READ_BUFFERS = 3  # the block in use, the one read ahead, and its decoded copy


@dataclass(frozen=True)
class Resources:
    """Where tasks will run.

    Attributes
    ----------
    workers : int
        Tasks that run at once.
    processes : int
        Processes that they are spread over.
    budget : int
        Bytes that all tasks may use at once.
    distributed : bool
        A :class:`distributed.Client` is active.
    """

    workers: int
    processes: int
    budget: int
    distributed: bool

    @property
    def per_process(self) -> int:
        """Bytes that the tasks of one process may use."""
        return self.budget // self.processes


@dataclass(frozen=True)
class Layout:
    """How a group of equal slices is run.

    Attributes
    ----------
    streamed : bool
        Read in spans of the long axis instead of whole.
    per_block : int
        Slices per block (1 if streamed).
    spans : int
        Spans that run at once (1 if whole).
    at_once : int
        Blocks that run at once.
    read_bytes : int
        What a streaming task reads at a time.
    peak_bytes : int
        Projected peak of the group's tasks.
    seconds : float
        Rough time of one slice, for the size of batches.
    """

    streamed: bool
    per_block: int
    spans: int
    at_once: int
    read_bytes: int
    peak_bytes: int
    seconds: float

    def n_blocks(self, n: int) -> int:
        """Return the number of blocks that `n` slices make."""
        return math.ceil(n / self.per_block)


def show(nbytes: float) -> str:
    """Return bytes for people.

    >>> show(3 * 2**20)
    '3 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < 1024 or unit == "TiB":
            return f"{nbytes:.3g} {unit}" if nbytes < 1000 else f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    raise AssertionError


def available_bytes() -> int:
    """Return the memory that this process may still take: what is free, or the control group's limit."""
    import psutil

    free = int(psutil.virtual_memory().available)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as handle:
                text = handle.read().strip()
        except OSError:
            continue
        if text.isdigit():
            return min(free, int(text))
    return free


def resources(settings: Mapping[str, Any] | None = None) -> Resources:
    """Return the active distributed client's workers, or this process's threads, with the memory budget."""
    wanted = config.get("memory-budget", settings)
    client = active_client()
    if client is not None:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        threads = sum(int(worker["nthreads"]) for worker in workers)
        limits = [int(worker["memory_limit"]) for worker in workers if worker.get("memory_limit")]
        processes = max(1, len(workers))
        limit = min(limits) * processes if limits else available_bytes()
        budget = config.parse_size(wanted) if wanted is not None else int(0.6 * limit)
        return Resources(max(1, threads), processes, budget, True)
    count = config.number("threads", settings) or _cores()
    budget = config.parse_size(wanted) if wanted is not None else int(0.6 * available_bytes())
    return Resources(int(count), 1, budget, False)


def active_client() -> Any | None:
    """Return the active :class:`distributed.Client`, or None; never imports distributed."""
    if "distributed" not in sys.modules:
        return None
    from distributed import default_client

    try:
        return default_client()  # type: ignore[no-untyped-call]
    except ValueError:
        return None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def layout(
    calls: Sequence[Call],
    n: int,
    rows: int,
    cols: int,
    dtype: np.dtype[Any],
    have: Resources,
    *,
    linked: bool,
    where: str,
    settings: Mapping[str, Any] | None = None,
) -> Layout:
    """Choose how `n` slices of one shape are run by `calls`; `linked` ones are hashed while they are read.

    Raises
    ------
    OverBudgetError
        No form of some kernel fits; names the slices, both numbers and what to change.
    """
    reading = [(kernel, params) for kernel, params in calls if WEIGHTS in kernel.inputs]
    weights = rows * cols * dtype.itemsize if reading else 0
    outputs = sum(field_bytes(f, rows, cols) for kernel, _ in calls for f in kernel.outputs.values())
    seconds = _seconds(reading, rows, cols, dtype)
    streamable = bool(reading) and all(kernel.blocks is not None for kernel, _ in reading)

    piece = min(weights, _PIECE_BYTES) if linked else 0

    def whole(count: int) -> int:
        return (
            piece
            + count * (weights + outputs)
            + max((_workspace(k, count, rows, cols, dtype) for k, _ in calls), default=0)
        )

    large = weights > config.parse_size(config.get("stream-above", settings))
    if streamable and (large or whole(1) * have.workers > have.budget):
        return _streamed(reading, rows, cols, dtype, have, outputs + piece, seconds, where, settings)
    if whole(1) > have.per_process:
        names = ", ".join(kernel.name for kernel, _ in reading if kernel.blocks is None) or calls[0][0].name
        raise OverBudgetError(
            f"{where}: {names} needs {show(whole(1))} for one slice and cannot be streamed; the budget is "
            f"{show(have.per_process)} per process. Raise the setting memory-budget, give workers more memory, or "
            "leave these parameters out with session.filter(…)"
        )
    at_once = min(have.workers, max(1, have.budget // whole(1)))
    per_block = min(n, max(1, _BLOCK_BYTES // max(1, weights)))
    balanced = max(math.ceil(n / (_BLOCKS_PER_WORKER * have.workers)), math.ceil(_MIN_BLOCK_SECONDS / seconds))
    per_block = max(1, min(per_block, balanced))
    while per_block > 1 and whole(per_block) * at_once > have.budget:
        per_block = (per_block + 1) // 2
    return Layout(False, per_block, 1, at_once, 0, whole(per_block) * at_once, seconds)


def _streamed(
    reading: Sequence[Call],
    rows: int,
    cols: int,
    dtype: np.dtype[Any],
    have: Resources,
    outputs: int,
    seconds: float,
    where: str,
    settings: Mapping[str, Any] | None,
) -> Layout:
    needs = [kernel.blocks.workspace((rows, cols), dtype) for kernel, _ in reading if kernel.blocks is not None]
    state = sum(need[0] for need in needs)
    finish = sum(need[1] for need in needs)  # those of several kernels may run at once
    read_bytes = config.parse_size(config.get("read-size", settings))
    buffers = _READ_BUFFERS * max(read_bytes, min(rows, cols) * 8)
    again = sum(buffers for kernel, _ in reading if getattr(kernel.blocks, "rereads", False))
    last = state + finish + again + outputs

    def peak(spans: int) -> int:
        return max(spans * (state + buffers), last)

    spans = have.workers
    while spans > 1 and (peak(spans) > have.budget or max(rows, cols) < 4 * spans):
        spans -= 1
    if peak(spans) > have.budget or max(state + buffers, last) > have.per_process:
        k = min(rows, cols)
        raise OverBudgetError(
            f"{where}: {', '.join(kernel.name for kernel, _ in reading)} needs {show(peak(1))} even when streamed "
            f"(a {k} × {k} float64 matrix is {show(8 * k * k)}); the budget is {show(have.budget)}, "
            f"{show(have.per_process)} per process. Raise the setting memory-budget, give workers more memory, or "
            "leave these parameters out with session.filter(…)"
        )
    return Layout(True, 1, spans, 1, read_bytes, peak(spans), seconds)


def route(kernel: Kernel, params: Mapping[str, Any], rows: int, cols: int, dtype: np.dtype[Any], chosen: Layout) -> str:
    """Return the name of the route that `kernel` takes in this layout."""
    if WEIGHTS not in kernel.inputs:
        return "batch" if kernel.batch else "per slice"
    if chosen.streamed and kernel.blocks is not None:
        return f"{kernel.blocks.route((rows, cols), dtype, params)}, streamed in {chosen.spans} spans"
    if kernel.route is not None:
        return kernel.route(rows, cols, dtype, params)
    return "whole" if kernel.batch else "whole, per slice"


def field_bytes(declared: Field, rows: int, cols: int) -> int:
    """Return the size of one slice's value of a field."""
    if not declared.dims:
        return 8
    size = {"sval": min(rows, cols), "row": rows, "col": cols}
    return 8 * math.prod(size[dim] for dim in declared.dims)


def _workspace(kernel: Kernel, n: int, rows: int, cols: int, dtype: np.dtype[Any]) -> int:
    if kernel.workspace is not None:
        return kernel.workspace(n, rows, cols, dtype.itemsize)
    if WEIGHTS in kernel.inputs:
        return 2 * 8 * rows * cols * (n if kernel.batch else 1)
    return 8 * 8 * min(rows, cols) * n


def _seconds(reading: Sequence[Call], rows: int, cols: int, dtype: np.dtype[Any]) -> float:
    k, long = min(rows, cols), max(rows, cols)
    spectral = any("sval" in f.dims for kernel, _ in reading for f in kernel.outputs.values())
    flops = (k * k * long + 10.0 * k**3) if spectral else 20.0 * rows * cols
    return 2e-5 + flops / _FLOPS + rows * cols * dtype.itemsize / _BYTES_PER_SECOND
