"""Weights of a model in the store: stacks of parameters of one shape and type, copied from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask import catalog
from diffract_dask.catalog import Checkpoint, Digester, Parameters, Tensor
from diffract_dask.errors import UnsupportedSourceError
from diffract_dask.sources import dtypes
from diffract_dask.store.arrays import FLAT, STRING, ArraySpec, dumps, group_document
from diffract_dask.store.objects import Objects
from diffract_dask.store.tables import text_column

__all__ = ["Stack", "check_linkable", "copy_weights", "stack_name", "stack_spec"]

_CHUNK_BYTES = 8 * 2**20
_WHOLE_BYTES = 64 * 2**20
_PART_BYTES = 16 * 2**20
_PANEL_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Stack:
    """A stored stack: where it lies and how it is chunked."""

    prefix: str
    spec: ArraySpec

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one parameter."""
        return self.spec.shape[1:]

    @property
    def axis(self) -> int:
        """Axis of a parameter that is cut into chunks; -1 if chunks hold whole ones."""
        cut = [i for i, (n, c) in enumerate(zip(self.shape, self.spec.chunks[1:], strict=True)) if c < n]
        return cut[0] if cut else -1

    def key(self, chunk: int, part: int = 0) -> str:
        """Return the key of a chunk: the number of the chunk along the stack, and of the part of a parameter."""
        index = [chunk, *[0] * len(self.shape)]
        if self.axis >= 0:
            index[1 + self.axis] = part
        return f"{self.prefix}/{self.spec.key(index)}"


def stack_name(shape: Sequence[int], dtype: str) -> str:
    """Return the folder of a stack."""
    return f"{'x'.join(map(str, shape)) or 'scalar'}-{dtype}"


def stack_spec(shape: tuple[int, ...], dtype: str, n: int) -> ArraySpec:
    """Return how `n` parameters of one shape and stored type are kept.

    Native types are not compressed, so that rows can be read by themselves; bfloat16 and float8 are widened to
    float32, whose zero half compression removes. Up to 64 MiB, chunks hold whole parameters, several small ones
    together; larger ones are cut along the longer side of their 2-D reading.
    """
    kept = dtypes.decoded(dtype)
    nbytes = math.prod(shape) * kept.itemsize
    rest = list(shape)
    together = 1
    if nbytes <= _WHOLE_BYTES:
        together = max(1, min(n, _CHUNK_BYTES // max(nbytes, 1)))
        together = math.ceil(n / math.ceil(n / together))  # even chunks: the last one is stored whole, too
    else:
        rows, cols = catalog.matrix_shape(shape)
        axis = 1 if cols > rows else 0
        rest[axis] = math.ceil(rest[axis] / math.ceil(nbytes / _PART_BYTES))
    dims = ("row", "col") if len(shape) == 2 else tuple(f"dim_{i}" for i in range(len(shape)))
    codec = "none" if kept == dtypes.carrier(dtype) else "bitshuffle"
    return ArraySpec((n, *shape), (together, *rest), kept.name, ("name", *dims), codec)  # type: ignore[arg-type]


def check_linkable(checkpoint: Checkpoint) -> None:
    """UnsupportedSourceError if a tensor has no place in a file where it could be read again."""
    for tensor in checkpoint.tensors:
        if tensor.readable and tensor.location is None:
            raise UnsupportedSourceError(
                f"{checkpoint.source}: {tensor.name!r} does not lie in a file as plain bytes (an object in memory, or "
                "compressed); link=True needs safetensors or an uncompressed .npz. Add it without link"
            )


def copy_weights(objects: Objects, prefix: str, checkpoint: Checkpoint, parameters: Parameters, *, fresh: bool) -> None:
    """Copy all weights into stacks below `prefix` and fill `digest`, `stack`, `index` and `tied_to`.

    Equal tensors are kept once. At most one parameter, or 256 MiB of a larger one, is in memory at a time.
    """
    groups: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for i, tensor in enumerate(checkpoint.tensors):
        if tensor.readable and 0 not in tensor.shape and not parameters.tied_to[i]:
            groups.setdefault((tensor.shape, tensor.dtype), []).append(i)
    for (shape, dtype), members in groups.items():
        name = stack_name(shape, dtype)
        writer = _StackWriter(objects, f"{prefix}/weights/{name}", stack_spec(shape, dtype, len(members)), dtype, fresh)
        for i in members:
            parameters.digest[i], place = writer.add(checkpoint.tensors[i])
            parameters.index[i], parameters.stack[i] = place, name
        writer.close()
    if groups:
        objects.set(f"{prefix}/weights/zarr.json", dumps(group_document()), fresh=fresh)
    for i in np.flatnonzero(parameters.tied_to != "").tolist():
        first = parameters.row(parameters.tied_to[i])
        for column in (parameters.digest, parameters.stack, parameters.index):
            column[i] = column[first]
    catalog.tie(parameters)


class _StackWriter:
    """Writes the chunks of one stack, parameter by parameter."""

    def __init__(self, objects: Objects, prefix: str, spec: ArraySpec, dtype: str, fresh: bool) -> None:
        self._objects, self._prefix, self._spec, self._dtype, self._fresh = objects, prefix, spec, dtype, fresh
        self._stack = Stack(f"{prefix}/weights", spec)
        self._names: list[str] = []
        self._known: dict[str, int] = {}
        self._chunk: NDArray[Any] | None = None

    def add(self, tensor: Tensor) -> tuple[str, int]:
        """Copy a tensor unless an equal one is there; return its digest and place."""
        n = len(self._names)
        digester = Digester(tensor.shape, tensor.dtype)
        if self._stack.axis >= 0:
            (self._add_rows if self._stack.axis == 0 else self._add_panels)(tensor, digester, n)
            digest = digester.hexdigest()
        else:
            raw = tensor.read(0, tensor.shape[0] if tensor.shape else 1)
            digester.update(raw)
            digest = digester.hexdigest()
            if digest not in self._known:
                self._add_whole(dtypes.decode(raw, self._dtype), n)
        if digest in self._known:
            return digest, self._known[digest]  # parts just written are written over by the next, or removed
        self._known[digest] = n
        self._names.append(tensor.name)
        return digest, n

    def _add_whole(self, values: NDArray[Any], n: int) -> None:
        size = self._spec.chunks[0]
        if size == 1:
            self._set(self._stack.key(n), values[np.newaxis])
            return
        if self._chunk is None:
            self._chunk = np.zeros(self._spec.chunks, self._spec.numpy)
        self._chunk[n % size] = values
        if n % size == size - 1:
            self._flush(n // size)

    def _flush(self, chunk: int) -> None:
        if self._chunk is not None:
            self._set(self._stack.key(chunk), self._chunk)
            self._chunk = None

    def _set(self, key: str, chunk: NDArray[Any]) -> None:
        self._objects.set(key, self._spec.encode(chunk), fresh=self._fresh)

    def _add_rows(self, tensor: Tensor, digester: Digester, n: int) -> None:
        step, rows = self._spec.chunks[1], tensor.shape[0]
        for part, start in enumerate(range(0, rows, step)):
            raw = tensor.read(start, min(start + step, rows))
            digester.update(raw)
            values = dtypes.decode(raw, self._dtype)
            if len(values) < step:
                values = np.concatenate([values, np.zeros((step - len(values), *values.shape[1:]), values.dtype)])
            self._set(self._stack.key(n, part), values[np.newaxis])

    def _add_panels(self, tensor: Tensor, digester: Digester, n: int) -> None:
        """Copy a wide tensor, which comes in rows, into chunks of columns: as many passes as memory asks for."""
        chunks = self._spec.chunks[1:]
        parts = self._spec.grid[2]
        at_once = max(1, _PANEL_BYTES // (math.prod(chunks) * self._spec.numpy.itemsize))
        step = catalog.piece_rows(tensor.shape, tensor.dtype)
        for first in range(0, parts, at_once):
            panels = [np.zeros(chunks, self._spec.numpy) for _ in range(first, min(first + at_once, parts))]
            for start in range(0, tensor.shape[0], step):
                raw = tensor.read(start, min(start + step, tensor.shape[0]))
                if first == 0:
                    digester.update(raw)
                for j, panel in enumerate(panels, first):
                    piece = raw[:, j * chunks[1] : (j + 1) * chunks[1]]
                    panel[start : start + len(raw), : piece.shape[1]] = dtypes.decode(piece, self._dtype)
            for j, panel in enumerate(panels, first):
                self._set(self._stack.key(n, j), panel[np.newaxis])

    def close(self) -> None:
        """Write the last chunk, the names and the metadata; remove the parts of a last duplicate."""
        n = len(self._names)
        self._flush(max(n - 1, 0) // self._spec.chunks[0])
        if n < self._spec.shape[0] and self._stack.axis >= 0:
            for part in range(self._spec.grid[1 + self._stack.axis]):
                self._objects.delete(self._stack.key(n, part))
        names = ArraySpec((n,), (n,), STRING, ("name",), encoding=FLAT)
        made: dict[str, bytes | memoryview] = {
            f"name/{key}": data for key, data in names.objects(text_column(self._names, n)).items()
        }
        made["weights/zarr.json"] = dumps(self._spec.resized((n, *self._spec.shape[1:])).document())
        made["zarr.json"] = dumps(group_document())
        for key, data in made.items():
            self._objects.set(f"{self._prefix}/{key}", data, fresh=self._fresh)
