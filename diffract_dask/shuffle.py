"""Seeded permutations of the entries of matrices: the null that keeps the entries and forgets their places.

Up to `SEQUENTIAL_ENTRIES` entries the permutation is Diffract's: one Fisher–Yates shuffle of all entries in row order.
That needs them all at hand. Larger matrices are shuffled by a two-pass scatter (Rao 1961, Sandelius 1962): each entry
draws one of a fixed number of bags, each bag is shuffled by itself, and the bags are put one behind the other, which
makes every permutation equally likely. Draws belong to an entry's position, in fixed blocks, and bags are filled in the
order of positions, so that the result depends on shape and seed alone: not on the memory there is, nor on the blocks in
which the matrix arrives, nor on whether the bags lie in memory or in a file.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from diffract_dask.errors import MatrixError
from diffract_dask.moments import as_matrices
from diffract_dask.options import check_whole

__all__ = [
    "SEQUENTIAL_ENTRIES",
    "Bags",
    "Filling",
    "Spill",
    "blocks_workspace",
    "check_seed",
    "permuted",
    "permuted_blocks",
    "shuffled_bags",
    "workspace",
]

SEQUENTIAL_ENTRIES = 2**24
"""Largest number of entries whose permutation is one shuffle of all of them (4096 × 4096)."""

BLOCK = 2**20
"""Entries whose bags are drawn together from one counter of the generator."""

BAG = 2**22
"""Entries that a bag holds at most, on average."""

Entries = NDArray[Any]


def permuted(w: ArrayLike, seed: int = 42) -> Entries:
    """Return each matrix with its entries permuted, all of them in the same way.

    Parameters
    ----------
    w : (..., m, n) array
        Any real dtype.
    seed : int
        Of the permutation, from 0 on.

    Returns
    -------
    (..., m, n) array
        A copy, in the dtype of `w`.

    Raises
    ------
    MatrixError
        `w` is not an array of real matrices.
    ConfigurationError
        The seed is not a whole number from 0 on.

    Notes
    -----
    Up to `SEQUENTIAL_ENTRIES` entries the permutation is that of ``numpy.random.default_rng(seed).shuffle(index)``,
    of the entries in row order; beyond that a scatter over fixed blocks of the entries with the longer side first, so
    that a matrix and its transpose then have permutations that are each other's transpose.

    Examples
    --------
    >>> permuted(np.arange(6).reshape(2, 3), seed=42).tolist()
    [[3, 2, 5], [4, 1, 0]]
    """
    array = as_matrices(w)
    rows, cols = array.shape[-2:]
    size, count = rows * cols, math.prod(array.shape[:-2])
    check_seed(seed)
    if size > SEQUENTIAL_ENTRIES:
        return _scattered(array.reshape(count, rows, cols), seed).reshape(array.shape)
    flat = array.reshape(count, size)
    if count == 1:
        result = flat.copy()
        np.random.default_rng(seed).shuffle(result[0])
    else:
        index = np.arange(size)
        np.random.default_rng(seed).shuffle(index)
        result = np.take(flat, index, axis=1)
    return result.reshape(array.shape)


def permuted_blocks(
    shape: tuple[int, int],
    dtype: DTypeLike,
    blocks: Iterable[Entries],
    seed: int = 42,
    directory: str | None = None,
) -> Iterator[Entries]:
    """Yield the permuted matrix in blocks of its longer side, from one pass over such blocks of the matrix.

    Parameters
    ----------
    shape : (rows, cols)
    dtype : dtype
        Of the blocks.
    blocks : iterable of (b, k) arrays
        All of the matrix in order, ``k = min(rows, cols)``: row blocks of a tall one, transposed column panels of a
        wide one.
    seed : int
        As for :func:`permuted`, which gives the same matrix.
    directory : str, optional
        Of the temporary file that holds the bags of a matrix of more than `SEQUENTIAL_ENTRIES` entries; it is as
        large as the matrix. Default: that of :mod:`tempfile`.

    Yields
    ------
    (b, k) array
        In the same orientation; of other lengths than the blocks that came in.

    Raises
    ------
    MatrixError
        The blocks are not those of a matrix of this shape.
    ConfigurationError
        The seed is not a whole number from 0 on.
    """
    rows, cols = shape
    check_seed(seed)
    if rows * cols > SEQUENTIAL_ENTRIES:
        with tempfile.TemporaryFile(dir=directory, prefix="diffract-dask-") as file:
            bags = Spill(file, np.dtype(dtype))
            _fill(bags, (block.ravel() for block in blocks), rows * cols, seed)
            yield from _in_rows(shuffled_bags(bags, rows * cols, seed), min(rows, cols))
        return
    whole = np.empty(shape, dtype)
    tall = whole if rows >= cols else whole.T
    start = 0
    for block in blocks:
        tall[start : start + len(block)] = block
        start += len(block)
    if start != len(tall):
        raise MatrixError(f"expected {len(tall)} lines of a {rows} × {cols} matrix, found {start}")
    np.random.default_rng(seed).shuffle(whole.reshape(-1))
    step = max(1, BLOCK // max(1, tall.shape[1]))
    for start in range(0, len(tall), step):
        yield tall[start : start + step]


def workspace(n: int, rows: int, cols: int, itemsize: int) -> int:
    """Return the bytes that :func:`permuted` needs beyond input and output for `n` matrices."""
    size = rows * cols
    if size > SEQUENTIAL_ENTRIES:
        return _block_bytes(itemsize) + size * itemsize  # a wide matrix is turned
    return 8 * size if n > 1 else 0


def blocks_workspace(shape: tuple[int, int], dtype: DTypeLike) -> int:
    """Return the bytes that :func:`permuted_blocks` needs beyond the blocks that come in."""
    itemsize, size = np.dtype(dtype).itemsize, shape[0] * shape[1]
    if size <= SEQUENTIAL_ENTRIES:
        return size * itemsize
    largest = BAG + 8 * math.isqrt(BAG)  # eight standard deviations of the number of entries in a bag
    return max(_block_bytes(itemsize), 2 * largest * itemsize + 2 * min(shape) * itemsize)


def check_seed(seed: int) -> None:
    """Raise ConfigurationError for a seed that is not a whole number from 0 on."""
    check_whole("the seed of a permutation", seed, 0)


def _block_bytes(itemsize: int) -> int:
    """Return what drawing and sorting one block takes: labels, their order, sorted entries."""
    return BLOCK * (2 + 2 + 8 + 8 + 2 * itemsize)


# The scatter


class Bags(Protocol):
    """Entries in a row, bag by bag."""

    def write(self, start: int, entries: Entries) -> None: ...
    def read(self, start: int, stop: int) -> Entries: ...


class _Memory:
    """Bags in an array, shuffled in place."""

    def __init__(self, entries: Entries) -> None:
        self.entries = entries

    def write(self, start: int, entries: Entries) -> None:
        self.entries[start : start + len(entries)] = entries

    def read(self, start: int, stop: int) -> Entries:
        return self.entries[start:stop]


class Spill:
    """Bags in a file."""

    def __init__(self, file: IO[bytes], dtype: np.dtype[Any]) -> None:
        self.file, self.dtype = file, dtype

    def write(self, start: int, entries: Entries) -> None:
        self.file.seek(start * self.dtype.itemsize)
        self.file.write(np.ascontiguousarray(entries, self.dtype).view(np.uint8).data)

    def read(self, start: int, stop: int) -> Entries:
        entries = np.empty(stop - start, self.dtype)
        self.file.seek(start * self.dtype.itemsize)
        self.file.readinto(entries.view(np.uint8).data)  # type: ignore[attr-defined]
        return entries


def _bits(size: int) -> int:
    """Return the binary logarithm of the number of bags."""
    return max(1, (size - 1).bit_length() - (BAG.bit_length() - 1))


def _labels(seed: int, number: int, count: int, bits: int) -> NDArray[Any]:
    """Return the bags of the entries of one block."""
    generator = np.random.Philox(key=[seed, 0], counter=[0, number, 0, 0])
    width = 1 if bits <= 8 else 2
    raw = generator.random_raw(math.ceil(count * width / 8)).astype("<u8")
    return raw.view(f"<u{width}")[:count] >> (8 * width - bits)


def _edges(size: int, seed: int) -> NDArray[np.int64]:
    """Return where bags begin and end."""
    bits = _bits(size)
    counts = np.zeros(2**bits, np.int64)
    for number, start in enumerate(range(0, size, BLOCK)):
        counts += np.bincount(_labels(seed, number, min(BLOCK, size - start), bits), minlength=2**bits)
    return np.concatenate([[0], np.cumsum(counts)])


class Filling:
    """Puts entries into their bags, those of one bag in the order in which they come.

    Parameters
    ----------
    bags : Bags
    size : int
        How many entries there are in all.
    seed : int
    """

    def __init__(self, bags: Bags, size: int, seed: int) -> None:
        self.bags, self.size, self.seed, self.bits = bags, size, seed, _bits(size)
        self.place = _edges(size, seed)[:-1].copy()
        self.position = 0
        self.labels: NDArray[Any] = np.empty(0, np.uint8)

    def add(self, part: Entries) -> None:
        """Take the next entries."""
        for start, stop in pairwise(_cuts(self.position, len(part))):
            first, number = self.position + start, (self.position + start) // BLOCK
            if first % BLOCK == 0:
                self.labels = _labels(self.seed, number, min(BLOCK, self.size - first), self.bits)
            own = self.labels[first - number * BLOCK :][: stop - start]
            if len(own) != stop - start:
                raise MatrixError(f"expected {self.size} entries, found more")
            entries = part[start:stop][np.argsort(own, kind="stable")]
            ends = np.cumsum(np.bincount(own, minlength=2**self.bits))
            begin = 0
            for bag in np.flatnonzero(np.diff(ends, prepend=0)).tolist():
                end = int(ends[bag])
                self.bags.write(int(self.place[bag]), entries[begin:end])
                self.place[bag] += end - begin
                begin = end
        self.position += len(part)

    def close(self) -> None:
        """Raise MatrixError if entries are missing."""
        if self.position != self.size:
            raise MatrixError(f"expected {self.size} entries, found {self.position}")


def _fill(bags: Bags, parts: Iterable[Entries], size: int, seed: int) -> None:
    filling = Filling(bags, size, seed)
    for part in parts:
        filling.add(part)
    filling.close()


def _cuts(position: int, count: int) -> list[int]:
    """Return where blocks end within `count` entries from `position` on."""
    inner = range(BLOCK - position % BLOCK, count, BLOCK)
    return [0, *inner, count] if count else [0]


def shuffled_bags(bags: Bags, size: int, seed: int) -> Iterator[Entries]:
    """Yield the bags one after another, each shuffled."""
    for bag, (start, stop) in enumerate(pairwise(_edges(size, seed).tolist())):
        entries = bags.read(start, stop)
        generator = np.random.Generator(np.random.Philox(key=[seed, 1], counter=[0, bag, 0, 0]))
        generator.shuffle(entries)
        yield entries


def _in_rows(parts: Iterable[Entries], k: int) -> Iterator[Entries]:
    """Yield flat parts as blocks of whole rows of length `k`."""
    rest: Entries | None = None
    for part in parts:
        joined = part if rest is None or not len(rest) else np.concatenate([rest, part])
        whole = len(joined) // k * k
        if whole:
            yield joined[:whole].reshape(-1, k)
        rest = joined[whole:].copy()


def _scattered(matrices: Entries, seed: int) -> Entries:
    """Return the scatter of matrices ``(n, m, n)`` in memory."""
    result = np.empty_like(matrices, order="C")
    for w, out in zip(matrices, result, strict=True):
        tall = w if w.shape[0] >= w.shape[1] else w.T
        target = out.reshape(-1) if tall is w else np.empty(w.size, w.dtype)
        step = max(1, BLOCK // tall.shape[1])
        _fill(
            _Memory(target),
            (tall[i : i + step].ravel() for i in range(0, len(tall), step)),
            w.size,
            seed,
        )
        for _ in shuffled_bags(_Memory(target), w.size, seed):
            pass
        if tall is not w:
            out[...] = target.reshape(tall.shape).T
    return result
