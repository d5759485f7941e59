"""Memory of a plan: what the workers have, what each form of a kernel needs, and which form fits.

Everything here is arithmetic on shapes; nothing is read or computed. A block's need is its weights, its
outputs and the largest workspace that its kernels state; as many blocks run at once as there are workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from diffract_dask import config
from diffract_dask.errors import OverBudgetError
from diffract_dask.fields import Field
from diffract_dask.kernel import WEIGHTS, Kernel, Streamed
from diffract_dask.workers import Resources, active_client, available_bytes, resources, show

__all__ = [
    "Layout",
    "Resources",
    "active_client",
    "available_bytes",
    "field_bytes",
    "layout",
    "resources",
    "route",
    "show",
    "stream_of",
]

Call = tuple[Kernel, Mapping[str, Any]]

_BLOCK_BYTES = 32 * 2**20
_BLOCKS_PER_WORKER = 3
_MIN_BLOCK_SECONDS = 0.02
_FLOPS = 2e10  # order of magnitude of one core in float64; only the sizes of blocks and batches follow from it
_BYTES_PER_SECOND = 1e9
_PIECE_BYTES = 2 * 16 * 2**20  # digests of linked slices: a piece of the file, and the one before it
_READ_BUFFERS = 3  # the block in use, the one read ahead, and its decoded copy


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
    partial : bool
        Kernels that have a twin for part of their outputs run as that, because nothing else fits.
    """

    streamed: bool
    per_block: int
    spans: int
    at_once: int
    read_bytes: int
    peak_bytes: int
    seconds: float
    partial: bool = False

    def n_blocks(self, n: int) -> int:
        """Return the number of blocks that `n` slices make."""
        return math.ceil(n / self.per_block)


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
    partial: bool = False,
) -> Layout:
    """Choose how `n` slices of one shape are run by `calls`; `linked` ones are hashed while they are read.

    With `partial`, kernels may give part of their outputs where nothing else fits.

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
        try:
            return _streamed(reading, rows, cols, dtype, have, outputs + piece, seconds, where, settings)
        except OverBudgetError:
            if not partial or all(kernel.partial is None for kernel, _ in reading):
                raise
            return _streamed(reading, rows, cols, dtype, have, outputs + piece, seconds, where, settings, partial)
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
    partial: bool = False,
) -> Layout:
    twins = [stream_of(kernel, partial) for kernel, _ in reading]
    needs = [twin.workspace((rows, cols), dtype) for twin in twins if twin is not None]
    state = sum(need[0] for need in needs)
    finish = sum(need[1] for need in needs)  # those of several kernels may run at once
    read_bytes = config.parse_size(config.get("read-size", settings))
    buffers = _READ_BUFFERS * max(read_bytes, min(rows, cols) * 8)
    again = sum(buffers for kernel, _ in reading if getattr(stream_of(kernel, partial), "rereads", False))
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
            f"{show(have.per_process)} per process. Raise the setting memory-budget, give workers more memory, take "
            "the leading part of spectra with partial=True, or leave these parameters out with session.filter(…)"
        )
    return Layout(True, 1, spans, 1, read_bytes, peak(spans), seconds, partial)


def stream_of(kernel: Kernel, partial: bool) -> Streamed | None:
    """Return the twin of a kernel that reads a slice in spans, if it has one."""
    return kernel.partial if partial and kernel.partial is not None else kernel.blocks


def route(kernel: Kernel, params: Mapping[str, Any], rows: int, cols: int, dtype: np.dtype[Any], chosen: Layout) -> str:
    """Return the name of the route that `kernel` takes in this layout."""
    if WEIGHTS not in kernel.inputs:
        return "batch" if kernel.batch else "per slice"
    twin = stream_of(kernel, chosen.partial)
    if chosen.streamed and twin is not None:
        return f"{twin.route((rows, cols), dtype, params)}, streamed in {chosen.spans} spans"
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
