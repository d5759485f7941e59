"""Slices: the weights of some parameters of one model as matrices, read when asked, here or on a worker."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask import catalog
from diffract_dask.catalog import Digester, Location
from diffract_dask.errors import LinkBrokenError
from diffract_dask.sources import dtypes, linked
from diffract_dask.store.arrays import raw_bytes
from diffract_dask.store.objects import Objects
from diffract_dask.store.weights import Stack

__all__ = ["Pieces", "Slices"]

_SPAN_BYTES = 16 * 2**20


class Pieces(Digester):
    """Hashes of a linked slice's pieces, filled by :meth:`Slices.blocks` while a span of it is read."""

    def hashes(self) -> list[bytes]:
        """Return the hashes so far, that of an unfinished last piece included; call it once."""
        if self._filled:
            self._close()
        return self._hashes


@dataclass(frozen=True, eq=False)
class Slices:
    """Slices of one (rows, cols) and stored dtype. Made by :meth:`Store.slices`.

    Picklable, unless the store is in memory: then send :meth:`inline`.

    Parameters
    ----------
    rows, cols : int
        Of every slice.
    stored_dtype : str
        Name of the type in the checkpoint.
    shapes : tuple of tuple of int
        Of the parameters, whose 2-D reading the slices are.
    digests : tuple of str
        Empty where unknown.
    """

    rows: int
    cols: int
    stored_dtype: str
    shapes: tuple[tuple[int, ...], ...]
    digests: tuple[str, ...]
    locations: tuple[Location, ...] = ()
    stacks: tuple[Stack, ...] = ()
    which: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    index: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    objects: Objects | None = None
    data: NDArray[Any] | None = None

    @property
    def n(self) -> int:
        """Number of slices."""
        return len(self.shapes)

    @property
    def linked(self) -> bool:
        """Whether the weights are read from the checkpoint's own file."""
        return bool(self.locations)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype in which slices are given."""
        return dtypes.decoded(self.stored_dtype)

    def inline(self) -> Slices:
        """Return the same slices with the data in them, if they would be read from memory of this process."""
        if self.objects is None or not self.objects.in_memory:
            return self
        return replace(self, data=self.load(), objects=None, stacks=())

    # ---------------------------------------------------------------------------------------------------- whole

    def load(self) -> NDArray[Any]:
        """Return all slices as ``(n, rows, cols)``.

        Raises
        ------
        LinkBrokenError
            A linked file is missing or shorter, or has changed since the view was made.
        """
        if self.linked:
            return self.load_with_digests()[0]
        if self.data is not None:
            return self.data
        breaks = self._breaks()
        held = self._in_place() if self.n and not len(breaks) else None
        if held is not None:
            return held
        out = np.empty((self.n, self.rows, self.cols), self.dtype)
        start = 0
        for stop in [*breaks, self.n] if self.n else []:
            self._load_run(out, start, stop)
            start = stop
        return out

    def _in_place(self) -> NDArray[Any] | None:
        """Return slices that lie side by side in this process's memory, uncopied and read-only; None if they do not."""
        assert self.objects is not None
        stack = self.stacks[self.which[0]]
        if stack.axis >= 0 or stack.spec.codec != "none":
            return None
        chunk, slot = divmod(int(self.index[0]), stack.spec.chunks[0])
        held = self.objects.in_place(stack.key(chunk))
        if held is None:
            return None
        nbytes = self.rows * self.cols * self.dtype.itemsize
        mine = held[slot * nbytes : (slot + self.n) * nbytes]
        whole = len(mine) == self.n * nbytes
        return np.frombuffer(mine, self.dtype).reshape(self.n, self.rows, self.cols) if whole else None

    def _breaks(self) -> NDArray[np.intp]:
        """Return where a run of neighbours in one chunk ends."""
        size = np.array([stack.spec.chunks[0] for stack in self.stacks])[self.which]
        chunk = self.index // size
        together = (np.diff(self.which) == 0) & (np.diff(self.index) == 1) & (np.diff(chunk) == 0)
        breaks: NDArray[np.intp] = np.flatnonzero(~together) + 1
        return breaks

    def _load_run(self, out: NDArray[Any], start: int, stop: int) -> None:
        stack = self.stacks[self.which[start]]
        if stack.axis >= 0:
            read = self._rows if self.rows >= self.cols else self._columns
            for i in range(start, stop):
                out[i] = read(i, {})(0, max(self.rows, self.cols))
            return
        assert self.objects is not None
        chunk, slot = divmod(int(self.index[start]), stack.spec.chunks[0])
        if stack.spec.codec == "none":
            view = raw_bytes(out[start:stop])
            self.objects.read_into(stack.key(chunk), slot * (len(view) // (stop - start)), view)
        else:
            block = stack.spec.decode(self.objects.require(stack.key(chunk)))
            out[start:stop] = block[slot : slot + stop - start].reshape(-1, self.rows, self.cols)

    def load_with_digests(self) -> tuple[NDArray[Any], list[str]]:
        """Return all slices and their digests; of linked ones, of the very bytes that were read."""
        if not self.linked:
            return self.load(), list(self.digests)
        out = np.empty((self.n, self.rows, self.cols), self.dtype)
        digests = []
        self._check_links()
        for i, (location, shape) in enumerate(zip(self.locations, self.shapes, strict=True)):
            digester = Digester(shape, self.stored_dtype)
            step = catalog.piece_rows(shape, self.stored_dtype)
            for start in range(0, self.rows, step):
                raw = linked.read_rows(location, (self.rows, self.cols), self.stored_dtype, start, start + step)
                digester.update(raw)
                out[i, start : start + len(raw)] = dtypes.decode(raw, self.stored_dtype)
            digests.append(digester.hexdigest())
        self._check_links()
        return out, digests

    def _check_links(self) -> None:
        """LinkBrokenError if a file is not as it was recorded: numbers must belong to one content."""
        for location in {location.path: location for location in self.locations}.values():
            if not linked.check(location):
                raise LinkBrokenError(
                    f"linked file {location.path!r} was changed after the store looked at it (size {location.size}, "
                    f"now {os.stat(location.path).st_size}); run the same call again, with the store open for writing: "
                    "what changed is then computed anew"
                )

    # ------------------------------------------------------------------------------------------------- in parts

    def span_edges(self, spans: int) -> list[int]:
        """Return edges that cut the long axis of a slice into at most `spans` parts of about equal size.

        They depend on shape and type alone, and are where pieces of the digest end.
        """
        long = max(self.rows, self.cols)
        if self.rows >= self.cols:
            unit = catalog.piece_rows((self.rows, self.cols), self.stored_dtype)
        else:
            unit = max(1, _SPAN_BYTES // (self.rows * dtypes.itemsize(self.stored_dtype)))
        units = math.ceil(long / unit)
        return sorted({min(long, round(units * i / spans) * unit) for i in range(spans + 1)})

    def digest_pieces(self, start: int, stop: int) -> Pieces:
        """Return the collector of piece hashes for the span [start, stop) of a tall linked slice."""
        return Pieces(self.shapes[0], self.stored_dtype)

    def combine(self, hashes: Sequence[bytes]) -> str:
        """Return the digest of the one slice from the hashes of all its pieces, in order."""
        return catalog.combine_digests(hashes, self.shapes[0], self.stored_dtype)

    def digest(self) -> str:
        """Return the digest of the one slice: as recorded, or from a pass over its file in the order of its bytes."""
        if not self.linked:
            return self.digests[0]
        self._check_links()
        pieces = Digester(self.shapes[0], self.stored_dtype)
        step = catalog.piece_rows(self.shapes[0], self.stored_dtype)
        for start in range(0, self.rows, step):
            pieces.update(
                linked.read_rows(self.locations[0], (self.rows, self.cols), self.stored_dtype, start, start + step)
            )
        self._check_links()
        return pieces.hexdigest()

    def blocks(self, start: int, stop: int, nbytes: int, pieces: Pieces | None = None) -> Iterator[NDArray[Any]]:
        """Yield the one slice in blocks along its long axis, the next one being read meanwhile.

        Parameters
        ----------
        start, stop : int
            Part of the long axis.
        nbytes : int
            Size of a block; blocks depend on this and `start` alone, not on how the slice is stored.
        pieces : Pieces, optional
            Takes the hashes of the bytes that are read. Only for a tall linked slice, and from an edge on.

        Yields
        ------
        ndarray
            ``(b, k)`` with ``k = min(rows, cols)``: rows of a tall slice, transposed columns of a wide one.
        """
        tall = self.rows >= self.cols
        short = min(self.rows, self.cols)
        step = max(1, nbytes // (short * self.dtype.itemsize))
        read = (self._rows if tall else self._columns)(0, {}, pieces)
        if self.linked:
            self._check_links()
        with ThreadPoolExecutor(1, "diffract-dask-read") as ahead:
            edges = [*range(start, stop, step), stop]
            pending = ahead.submit(read, edges[0], edges[1]) if stop > start else None
            for i in range(len(edges) - 1):
                assert pending is not None
                block = pending.result()
                if i + 2 < len(edges):
                    pending = ahead.submit(read, edges[i + 1], edges[i + 2])
                yield block if tall else block.T
        if self.linked:
            self._check_links()

    def _rows(
        self, i: int, cache: dict[str, NDArray[Any]], pieces: Pieces | None = None
    ) -> Callable[[int, int], NDArray[Any]]:
        """Return ``read(start, stop)`` for rows of slice `i`; `cache` keeps the last decoded chunk."""
        shape = (self.rows, self.cols)

        def from_file(start: int, stop: int) -> NDArray[Any]:
            raw = linked.read_rows(self.locations[i], shape, self.stored_dtype, start, stop)
            if pieces is not None:
                pieces.update(raw)
            return dtypes.decode(raw, self.stored_dtype)

        def from_stack(start: int, stop: int) -> NDArray[Any]:
            stack = self.stacks[self.which[i]]
            together, per_chunk = stack.spec.chunks[:2]
            chunk, slot = divmod(int(self.index[i]), together)
            out = np.empty((stop - start, self.cols), self.dtype)
            for part in range(start // per_chunk, math.ceil(stop / per_chunk)):
                low, high = max(start, part * per_chunk), min(stop, (part + 1) * per_chunk)
                place = out[low - start : high - start]
                first = slot * per_chunk + low - part * per_chunk
                self._chunk_rows(stack, stack.key(chunk, part), first, place, cache)
            return out

        if self.linked:
            return from_file
        if self.data is not None:
            data = self.data[i]
            return lambda start, stop: data[start:stop]
        return from_stack

    def _chunk_rows(
        self, stack: Stack, key: str, first: int, out: NDArray[Any], cache: dict[str, NDArray[Any]]
    ) -> None:
        """Fill `out` with rows of a chunk from row `first` on, counted over all slices in it."""
        assert self.objects is not None
        if stack.spec.codec == "none":
            self.objects.read_into(key, first * self.cols * out.itemsize, raw_bytes(out))
            return
        out[:] = self._cached(stack, key, cache).reshape(-1, self.cols)[first : first + len(out)]

    def _columns(
        self, i: int, cache: dict[str, NDArray[Any]], pieces: Pieces | None = None
    ) -> Callable[[int, int], NDArray[Any]]:
        """Return ``read(start, stop)`` for columns of slice `i`, as (rows, stop - start)."""

        def from_file(start: int, stop: int) -> NDArray[Any]:
            raw = linked.read_columns(self.locations[i], (self.rows, self.cols), self.stored_dtype, start, stop)
            return dtypes.decode(raw, self.stored_dtype)

        def from_stack(start: int, stop: int) -> NDArray[Any]:
            stack = self.stacks[self.which[i]]
            together = stack.spec.chunks[0]
            chunk, slot = divmod(int(self.index[i]), together)
            width = math.prod(stack.spec.chunks[2:]) if stack.axis == 1 else self.cols
            parts = []
            for part in range(start // width, math.ceil(stop / width)):
                block = self._cached(stack, stack.key(chunk, part), cache)[slot].reshape(self.rows, -1)
                parts.append(block[:, max(start - part * width, 0) : stop - part * width])
            return np.concatenate(parts, axis=1)

        if self.linked:
            return from_file
        if self.data is not None:
            data = self.data[i]
            return lambda start, stop: data[:, start:stop]
        return from_stack

    def _cached(self, stack: Stack, key: str, cache: dict[str, NDArray[Any]]) -> NDArray[Any]:
        if key not in cache:
            assert self.objects is not None
            cache.clear()
            cache[key] = stack.spec.decode(self.objects.require(key))
        return cache[key]
