"""Writing the view: the chunks in which changed models differ, or all of them beside the old ones; metadata last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask.fields import MISSING, STATUS_MEANING
from diffract_dask.store.arrays import KEY_ENCODINGS, STRING, ArraySpec, consolidated, dumps, group_document
from diffract_dask.store.objects import Objects
from diffract_dask.store.tables import text_column
from diffract_dask.store.viewfile import (
    INDEX,
    INDEX_ATTRS,
    MODEL_CHUNK,
    NAME_CHUNK,
    PER_CELL,
    PLANES,
    VIEW,
    Layout,
    Record,
    ViewFile,
    path_of,
    spec_of,
)
from diffract_dask.view import COORDINATE_ATTRS, NAME_COORDINATES, addresses

__all__ = ["SCHEMA_VERSION", "root_object", "update_view"]

SCHEMA_VERSION = 1
"""Version of the store's layout; kept in the root's attributes."""

Slots = Mapping[str, Sequence[str]]

_CATALOG = frozenset({*PER_CELL, "cell"})
_WRITERS = 4  # coding and writing chunks leaves the interpreter free for most of the time

_STATUS_ATTRS = {
    "long_name": "Why a value is as it is",
    "flag_values": [*(int(status) for status in STATUS_MEANING), MISSING],
    "flag_meanings": " ".join([*(status.name.lower() for status in STATUS_MEANING), "missing"]),
}
_KEY_ATTRS = {"long_name": "Provenance key of the stored value; 0: none"}


def root_object(created_by: str, members: Mapping[str, Any]) -> bytes:
    """Return the root's metadata object, with the metadata of the view's members.

    Only the view is consolidated: that is what ``xr.open_zarr(store, group="view")`` looks for in the root, and it
    stays small however many models there are.
    """
    return dumps(consolidated(group_document({"schema_version": SCHEMA_VERSION, "created_by": created_by}), members))


def update_view(
    objects: Objects,
    layout: Layout,
    attrs: Mapping[str, Mapping[str, Any]],
    state: Mapping[str, Any],
    created_by: str,
    *,
    anew: bool = False,
    documents: bool = True,
) -> None:
    """Bring the view on disk up to a layout.

    Parameters
    ----------
    objects : Objects
    layout : Layout
    attrs : mapping of field to mapping
        Attributes of the fields' variables.
    state : mapping
        What is kept beside: ``generation``, the count of writes at which the view will be up to date; ``contents``
        by model; ``links``, the positions of linked models.
    created_by : str
    anew : bool
        Write all chunks; so it is done whenever positions change or a field is gone, too.
    documents : bool
        Write each array's own metadata even if only the shape is new. Readers of the groups do not need them.
    """
    base = layout.base
    anew = bool(layout.forget_gone()) or anew or layout.compacted or not base.exists
    turn = (base.turn + 1) % len(KEY_ENCODINGS) if anew and base.exists else base.turn
    slots: Slots = {
        f"{VIEW}/status": [*layout.fields, *layout.array_fields],
        f"{VIEW}/key": layout.kernels,
        f"{VIEW}/model_status": layout.model_fields,
        f"{VIEW}/model_key": layout.model_kernels,
    }
    if anew:
        _remove_naming(objects, turn)
    else:  # slots keep their places
        slots = {path: list(dict.fromkeys([*base.slots[path], *names])) for path, names in slots.items()}
    columns = [_Column(layout, kind, name, slots, turn) for kind, name in layout.columns()]
    same = set() if anew else layout.same_catalog  # read before the first chunk is replaced

    def write(column: _Column) -> None:
        objects.set_many(dict(column.all_chunks() if anew else column.changed_chunks(same)))

    local = objects.root is not None or objects.in_memory  # file systems of object stores gather writes themselves
    with ThreadPoolExecutor(_WRITERS if local else 1, "diffract-dask-view") as pool:
        list(pool.map(write, columns))
    _write_labels(objects, layout, slots, turn, 0 if anew else base.n_names)
    own = {"folders": layout.folders, "commits": layout.commits, "slots": slots, "turn": turn}
    own["arrays"] = {name: attrs[name] for name in layout.array_fields}
    members = _members(layout, attrs, slots, turn, {**own, **state})
    _write_documents(objects, base, members, created_by, documents or anew)
    if anew:
        _remove_naming(objects, turn + 1)
        _remove_unused(objects, members)


class _Column:
    """One column of the view on its way to disk."""

    def __init__(self, layout: Layout, kind: str, name: str, slots: Slots, turn: int) -> None:
        self.layout, self.kind, self.name = layout, kind, name
        self.path = path_of(kind, name)
        self.spec = spec_of(kind, (), turn)
        self.lead = (slots[self.path].index(name),) if kind in PLANES else ()
        inner = slice(len(self.lead), None)
        self.plane = replace(
            self.spec, shape=layout.shape(kind), chunks=self.spec.chunks[inner], dims=self.spec.dims[inner]
        )

    @cached_property
    def _blank(self) -> NDArray[Any]:
        """A chunk of fill values, blanked again after use: making one takes as long as coding it."""
        return self.plane.blank()

    def _key(self, index: tuple[int, ...]) -> str:
        return f"{self.path}/{self.spec.key((*self.lead, *index))}"

    def all_chunks(self) -> Iterator[tuple[str, bytes | memoryview | None]]:
        """Yield all chunks that hold anything."""
        values = self.layout.load(self.kind, self.name)
        for index in np.ndindex(*self.plane.grid):
            part = values[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, self.plane.chunks, strict=True))]
            if not self.plane.is_fill(part):
                filled = self._blank[tuple(slice(0, n) for n in part.shape)]
                filled[...] = part
                yield self._key(index), self.plane.encode(self._blank)
                filled[...] = self.plane.fill_value

    def changed_chunks(self, same: Set[str]) -> Iterator[tuple[str, bytes | memoryview | None]]:
        """Yield the chunks in which a changed model differs; None where nothing is left.

        `same` are the folders of models whose names, shapes and contents did not change.
        What is beyond the models on disk is blank there: a model that is new and holds nothing here costs nothing.
        """
        known = self.layout.base.place(self.kind, self.name) is not None
        bands: dict[int, list[tuple[int, bool, Record]]] = {}
        for record in self.layout.records:
            row = self.layout.row_of[record.header.folder]
            fresh = row >= self.layout.n_base or not known
            if not fresh and self.kind in _CATALOG and record.header.folder in same:
                continue
            if not fresh or record.cells(self.kind, self.name) is not None:
                bands.setdefault(row // MODEL_CHUNK, []).append((row % MODEL_CHUNK, fresh, record))
        for band, rows in bands.items():
            for column in range(self.plane.grid[-1]) if self.plane.dims[-1] == "name" else [None]:
                yield from self._changed_chunk(band, column, rows, known)

    def _changed_chunk(
        self, band: int, column: int | None, rows: list[tuple[int, bool, Record]], known: bool
    ) -> Iterator[tuple[str, bytes | memoryview | None]]:
        parts = [(row, fresh, *self._part(record, column)) for row, fresh, record in rows]
        if all(fresh and (not at.size or self.plane.is_fill(values)) for _, fresh, at, values in parts):
            return
        per_model = (0,) if self.kind == "cell" else ()
        key = self._key((*per_model, band) if column is None else (*per_model, band, column))
        stored = self.layout.objects.get(key) if known else None
        first = parts[0][0]
        if column is not None and self.plane.dtype == STRING and all(fresh for _, fresh, *_ in parts):
            added = np.full((parts[-1][0] + 1 - first, NAME_CHUNK), "", object)
            for row, _, at, values in parts:
                added[row - first, at] = values
            yield key, self.plane.with_rows(stored, first, added)
            return
        chunk = self._blank if stored is None else self.plane.decode(stored)
        changed = False
        for row, _, at, values in parts:
            where = (..., row) if column is None else (..., row, slice(None))
            old = chunk[where].copy()
            chunk[where] = self.plane.fill_value
            if at.size:
                chunk[(..., row) if column is None else (..., row, at)] = values if column is not None else values[0]
            changed |= not _same(old, chunk[where])
        if changed:
            yield key, None if stored is not None and self.plane.is_fill(chunk) else self.plane.encode(chunk)
        if stored is None:
            for row, *_ in parts:
                chunk[(..., row) if column is None else (..., row, slice(None))] = self.plane.fill_value

    def _part(self, record: Record, column: int | None) -> tuple[NDArray[np.intp], NDArray[Any]]:
        """Return places within a chunk, and values, of what a model has there."""
        values = record.cells(self.kind, self.name)
        if values is None:
            return np.empty(0, np.intp), np.empty(0, self.plane.numpy)
        if column is None:
            return np.zeros(1, np.intp), values
        if column not in record.places:
            return np.empty(0, np.intp), np.empty(0, self.plane.numpy)
        mine, at = record.places[column]
        return at, values[..., mine]


def _same(old: NDArray[Any], new: NDArray[Any]) -> bool:
    if old.dtype.kind == "f":  # by bits: NaN equals NaN
        return np.array_equal(np.asarray(old).view(np.uint64), np.asarray(new).view(np.uint64))
    return np.array_equal(old, new)


# ----------------------------------------------------------------------------------------- labels and documents


def _labels(names: Sequence[str], slots: Slots) -> dict[str, tuple[str, NDArray[Any]]]:
    """Return the coordinates of names and of slots: path to (dimension, values)."""
    found = {f"{VIEW}/{dim}": (dim, text_column(slots[path], len(slots[path]))) for path, dim, *_ in PLANES.values()}
    found[f"{VIEW}/name"] = ("name", text_column(names, len(names)))
    return found


def _label_spec(label: str, n: int, turn: int) -> ArraySpec:
    dtype = "int64" if label == "block" else STRING
    attrs = COORDINATE_ATTRS.get(label, {"long_name": label.replace("_", " ").capitalize()})
    axis = "name" if label in NAME_COORDINATES else label
    fill = -1 if label == "block" else None
    return ArraySpec((n,), (NAME_CHUNK,), dtype, (axis,), "lz4", fill, attrs, KEY_ENCODINGS[turn])


def _write_labels(objects: Objects, layout: Layout, slots: Slots, turn: int, n_known: int) -> None:
    """Write the coordinates of slots, and those of names from the first new one's chunk on."""
    made: dict[str, bytes | memoryview | None] = {}
    start = n_known // NAME_CHUNK * NAME_CHUNK
    new_names = layout.names[start:] if len(layout.names) > n_known else []
    for path, (label, values) in _labels(new_names, slots).items():
        first = start // NAME_CHUNK if label == "name" else 0
        made.update(_label_chunks(path, label, values, turn, first))
    for label, values in addresses(new_names).items():
        made.update(_label_chunks(f"{VIEW}/{label}", label, values, turn, start // NAME_CHUNK))
    objects.set_many(made)


def _label_chunks(
    path: str, label: str, values: NDArray[Any], turn: int, first: int
) -> Iterator[tuple[str, bytes | memoryview]]:
    spec = _label_spec(label, len(values), turn)
    for i in range(spec.grid[0]):
        chunk = spec.blank()
        part = values[i * NAME_CHUNK : (i + 1) * NAME_CHUNK]
        chunk[: len(part)] = part
        yield f"{path}/{spec.key((first + i,))}", spec.encode(chunk)


def _members(
    layout: Layout, attrs: Mapping[str, Mapping[str, Any]], slots: Slots, turn: int, state: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the metadata of the view, the index and all their members, by path."""
    coordinates = ["step", "parent", "added", "type", "rows", "cols", *NAME_COORDINATES]
    members = {VIEW: group_document({"coordinates": " ".join(coordinates)}), INDEX: group_document(state)}
    for kind, name in layout.columns():
        if kind not in PLANES:
            labels = attrs[name] if name else COORDINATE_ATTRS.get(kind) or {"long_name": INDEX_ATTRS[kind]}
            shape = layout.shape(kind)
            members[path_of(kind, name)] = spec_of(kind, shape, turn).resized(shape, labels).document()
    for kind, (path, *_) in PLANES.items():
        shape = (len(slots[path]), *layout.shape(kind))
        labels = _STATUS_ATTRS if kind.endswith("status") else _KEY_ATTRS
        members[path] = spec_of(kind, shape, turn).resized(shape, labels).document()
    for path, (label, values) in _labels(layout.names, slots).items():
        members[path] = _label_spec(label, len(values), turn).document()
    for label in NAME_COORDINATES:
        members[f"{VIEW}/{label}"] = _label_spec(label, len(layout.names), turn).document()
    return members


def _write_documents(
    objects: Objects, base: ViewFile, members: dict[str, dict[str, Any]], created_by: str, every: bool
) -> None:
    """Write the metadata: of arrays, then of the groups with their members, the root last.

    A model that is added changes the shape of all arrays. Their own documents then wait for the next refresh with
    `every`: they are valid as they are, and replacing forty files takes as long as all else.
    """
    shape = [members[f"{VIEW}/{label}"]["shape"][0] for label in ("model_id", "name")]
    every = every or any(d["node_type"] == "array" and path not in base.documents for path, d in members.items())
    behind = every and shape != base.documented
    members[INDEX]["attributes"]["documented"] = shape if every else base.documented
    for path, document in members.items():
        if document["node_type"] == "array":
            known = base.documents.get(path)
            if behind or known is None or {**known, "shape": 0} != {**document, "shape": 0}:
                objects.set(f"{path}/zarr.json", dumps(document))
    for group in (INDEX, VIEW) if behind or not base.exists else (VIEW,):
        below = {path.removeprefix(f"{group}/"): d for path, d in members.items() if path.startswith(f"{group}/")}
        objects.set(f"{group}/zarr.json", dumps(consolidated(members[group], below)))
    objects.set("zarr.json", root_object(created_by, members))


# ---------------------------------------------------------------------------------------------------- old chunks


def _arrays_below(objects: Objects) -> Iterator[str]:
    for group in (VIEW, INDEX):
        for name in objects.list_dir(group):
            if name != "zarr.json":
                yield f"{group}/{name}"


def _remove_naming(objects: Objects, turn: int) -> None:
    """Remove the chunks of one naming: the oldest ones, or what a killed writer left of the next.

    Those of the naming before the present one stay: who opened the view before it changed still reads them.
    """
    wanted = turn % len(KEY_ENCODINGS)
    for path in _arrays_below(objects):
        for entry in objects.list_dir(path):
            if entry == "c" and wanted == 0:
                objects.delete_dir(f"{path}/c")
            elif (entry.startswith("c.") and wanted == 1) or (entry[:1].isdigit() and wanted == 2):
                objects.delete(f"{path}/{entry}")


def _remove_unused(objects: Objects, members: Mapping[str, Any]) -> None:
    """Remove the variables of fields that are gone."""
    for path in _arrays_below(objects):
        if path not in members:
            objects.delete_dir(path)
