"""The view on disk: one Dataset over (model_id, name) of all models, derived from ``models/``.

Chunks are 256 models × 512 names. Models and names keep their positions, so that a chunk which is replaced while
somebody reads says the same of every cell, or something newer; the consolidated metadata come last, in the view's
and in the root's ``zarr.json``. Where positions have to change (a model was erased), everything is written anew
under another naming of the chunks, beside the old ones, and the metadata say which to read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask.catalog import Parameters
from diffract_dask.digests import digest_keys
from diffract_dask.fields import MISSING
from diffract_dask.store.arrays import KEY_ENCODINGS, STRING, ArraySpec
from diffract_dask.store.objects import Objects
from diffract_dask.store.tables import Header, text_column
from diffract_dask.store.values import Packed
from diffract_dask.view import View, public_attrs

__all__ = ["VIEW", "Layout", "Record", "ViewFile"]

VIEW = "view"
INDEX = "index"
MODEL_CHUNK, NAME_CHUNK = 256, 512

Column = tuple[str, str]
"""Kind and name of one array of a view, as :meth:`diffract_dask.view.Source.load` takes them."""

PER_CELL: dict[str, tuple[str, str, Any]] = {  # kind: path, dtype, fill
    "type": (f"{VIEW}/type", STRING, ""),
    "rows": (f"{VIEW}/rows", "int64", 0),
    "cols": (f"{VIEW}/cols", "int64", 0),
    "digest": (f"{INDEX}/digest", "uint64", 0),
}
PARTS = ("row", "canonical", "analysed")
"""Kinds that lie in one array, ``index/cell``: fewer objects to replace when a model is added."""

CELL = f"{INDEX}/cell"
PER_MODEL: dict[str, tuple[str, str, Any]] = {
    "model_id": (f"{VIEW}/model_id", STRING, ""),
    "step": (f"{VIEW}/step", "float64", np.nan),
    "parent": (f"{VIEW}/parent", STRING, ""),
    "added": (f"{VIEW}/added", STRING, ""),
}
PLANES: dict[str, tuple[str, str, str, Any]] = {  # kind: path, slots' dimension, dtype, fill
    "status": (f"{VIEW}/status", "field", "uint8", MISSING),
    "key": (f"{VIEW}/key", "kernel", "uint64", 0),
    "model_status": (f"{VIEW}/model_status", "model_field", "uint8", MISSING),
    "model_key": (f"{VIEW}/model_key", "model_kernel", "uint64", 0),
}
INDEX_ATTRS = {
    "cell": "Position among the model's parameters; position of the name that it is tied to; whether it is analysed",
    "digest": "First 64 bits of the digest; 0 unknown",
}


# --------------------------------------------------------------------------------------------- one model's part


@dataclass
class Record:
    """What one model contributes to the view.

    Parameters
    ----------
    header : Header
    parameters : Parameters
    packed : Packed
    """

    header: Header
    parameters: Parameters
    packed: Packed
    columns: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))

    @cached_property
    def places(self) -> dict[int, tuple[NDArray[np.intp], NDArray[np.intp]]]:
        """Which parameters lie in which column of chunks, and where in it."""
        chunk = self.columns // NAME_CHUNK
        return {int(c): (mine := np.flatnonzero(chunk == c), self.columns[mine] % NAME_CHUNK) for c in np.unique(chunk)}

    @cached_property
    def fields(self) -> list[str]:
        """Slice-level scalar fields of which anything is stored."""
        return [name for name in self._present(self.packed.status) if not self.is_array(name)]

    @cached_property
    def array_fields(self) -> list[str]:
        """Array fields of which anything is stored."""
        return [name for name in self._present(self.packed.status) if self.is_array(name)]

    @cached_property
    def model_fields(self) -> list[str]:
        """Model-level fields that are stored."""
        return self._present(self.packed.model_status[:, np.newaxis])

    @cached_property
    def kernels(self) -> list[str]:
        """Slice-level kernels that have keys."""
        return [name for name, keys in zip(self.packed.kernels, self.packed.key, strict=True) if keys.any()]

    @cached_property
    def model_kernels(self) -> list[str]:
        """Model-level kernels that have keys."""
        return [name for name, key in zip(self.packed.kernels, self.packed.model_key, strict=True) if key]

    def is_array(self, name: str) -> bool:
        """Return whether a field is an array field."""
        return bool(self.packed.attrs.get(name, {}).get("dims"))

    def _present(self, status: NDArray[np.uint8]) -> list[str]:
        return [name for name, row in zip(self.packed.fields, status, strict=True) if (row != MISSING).any()]

    @cached_property
    def _digests(self) -> NDArray[np.uint64]:
        return digest_keys(self.parameters.digest)

    def cells(self, kind: str, name: str = "") -> NDArray[Any] | None:
        """Return the values of a column for the model's parameters (kinds per model: one), None if it has none."""
        packed, parameters = self.packed, self.parameters
        if kind in ("value", "status", "model_value", "model_status"):
            if name not in packed.fields:
                return None
            found: NDArray[Any] = getattr(packed, kind)[packed.fields.index(name)]
            return np.atleast_1d(found)
        if kind in ("key", "model_key"):
            return np.atleast_1d(getattr(packed, kind)[packed.kernels.index(name)]) if name in packed.kernels else None
        if kind == "cell":
            return np.stack([np.asarray(self.cells(part), np.int32) for part in PARTS])
        if kind == "row":
            return np.arange(len(parameters), dtype=np.int32)
        if kind == "canonical":
            return self.columns[parameters.canonical].astype(np.int32)
        if kind == "digest":
            return self._digests
        if kind in PER_MODEL:
            value = self._of_model(kind)
            return text_column([value], 1) if PER_MODEL[kind][1] == STRING else np.array([value])
        column: NDArray[Any] = getattr(parameters, kind)
        return column

    def _of_model(self, kind: str) -> Any:
        if kind == "step":
            return np.nan if self.header.step is None else self.header.step
        if kind == "parent":
            parents = self.header.parents
            return parents[0] if len(parents) == 1 else json.dumps(parents, ensure_ascii=False) if parents else ""
        return getattr(self.header, kind)


# ------------------------------------------------------------------------------------------------ what is on disk


class ViewFile:
    """The view as the root's metadata describe it.

    Parameters
    ----------
    objects : Objects
    document : dict
        The root's ``zarr.json``.
    """

    def __init__(self, objects: Objects, document: Mapping[str, Any]) -> None:
        self.objects = objects
        members = document.get("consolidated_metadata", {}).get("metadata", {})
        self.documents: dict[str, dict[str, Any]] = {
            path: member for path, member in members.items() if member["node_type"] == "array"
        }
        state = members.get(INDEX, {}).get("attributes", {})
        self.generation: int = state.get("generation", -1)
        self.folders: list[str] = state.get("folders", [])
        self.commits: list[int] = state.get("commits", [])
        self.contents: list[str] = state.get("contents", [])
        self.links: set[int] = set(state.get("links", []))
        self.documented: list[int] = state.get("documented", [])
        self._array_attrs: dict[str, dict[str, Any]] = state.get("arrays", {})
        self.slots: dict[str, list[str]] = {path: state.get("slots", {}).get(path, []) for path, *_ in PLANES.values()}
        self.turn: int = state.get("turn", 0)

    @property
    def exists(self) -> bool:
        """Whether there is a view."""
        return bool(self.documents)

    def spec(self, path: str) -> ArraySpec | None:
        """Return the spec of an array, None if there is none."""
        return ArraySpec.parse(self.documents[path]) if path in self.documents else None

    @property
    def names(self) -> list[str]:
        """Names of parameters, by position."""
        return list(self._whole(f"{VIEW}/name"))

    @property
    def n_names(self) -> int:
        """Number of names."""
        return int(self.documents[f"{VIEW}/name"]["shape"][0]) if self.exists else 0

    def of_models(self, kind: str) -> NDArray[Any]:
        """Return a column per model."""
        return self._whole(PER_MODEL[kind][0])

    def _whole(self, path: str) -> NDArray[Any]:
        spec = self.spec(path)
        return np.empty(0, object) if spec is None else spec.read(self.objects, path)

    @property
    def fields(self) -> list[str]:
        """Scalar fields."""
        return [name for name in self.slots[f"{VIEW}/status"] if f"{VIEW}/{name}" in self.documents]

    @property
    def array_fields(self) -> list[str]:
        """Array fields: they have a status and no variable."""
        return [name for name in self.slots[f"{VIEW}/status"] if f"{VIEW}/{name}" not in self.documents]

    @property
    def attrs(self) -> dict[str, dict[str, Any]]:
        """Attributes of the fields' variables; array fields, which have none, have ``dims`` among theirs."""
        names = [*self.fields, *self.slots[f"{VIEW}/model_status"]]
        return {name: dict(self.documents[f"{VIEW}/{name}"]["attributes"]) for name in names} | self._array_attrs

    def place(self, kind: str, name: str) -> tuple[str, int | None, ArraySpec] | None:
        """Return the path, the slot and the spec (of one plane) of a column; None if it is not there."""
        path, slot = path_of(kind, name), None
        if kind in PLANES:
            if name not in self.slots[path]:
                return None
            slot = self.slots[path].index(name)
        spec = self.spec(path)
        return None if spec is None else (path, slot, spec)

    @cached_property
    def _cells(self) -> NDArray[np.int32]:
        return self._whole(CELL)

    def load(self, kind: str, name: str = "") -> NDArray[Any] | None:
        """Return a whole column, None if it is not there."""
        if kind in PARTS:
            if not self.exists:
                return None
            part: NDArray[np.int32] = self._cells[PARTS.index(kind)]
            return np.equal(part, 1) if kind == "analysed" else part
        place = self.place(kind, name)
        if place is None:
            return None
        path, slot, spec = place
        lead = () if slot is None else (slot,)
        inner = slice(len(lead), None)
        plane = replace(spec, shape=spec.shape[inner], chunks=spec.chunks[inner], dims=spec.dims[inner])
        indices = list(np.ndindex(*plane.grid))
        found = self.objects.get_many([f"{path}/{spec.key((*lead, *index))}" for index in indices])
        return plane.assemble(dict(zip(indices, found, strict=True)))


def path_of(kind: str, name: str) -> str:
    """Return the path of the array that holds a column."""
    if kind in ("value", "model_value"):
        return f"{VIEW}/{name}"
    if kind == "cell":
        return CELL
    return PLANES[kind][0] if kind in PLANES else {**PER_CELL, **PER_MODEL}[kind][0]


# -------------------------------------------------------------------------------------- disk and newer records


class Layout:
    """Positions of models and names when some models are newer than the view on disk, and the columns then.

    Parameters
    ----------
    base : ViewFile
    commits : mapping of str to int, optional
        Folders of all models there are, with their counts of writes; None: what `base` says is up to date.
    records : sequence of Record
        The models that the view on disk lacks or has of an earlier state.
    outdated : callable, optional
        ``(folders, commits) -> mask``, behind :meth:`outdated`.
    """

    def __init__(
        self,
        base: ViewFile,
        commits: Mapping[str, int] | None = None,
        records: Sequence[Record] = (),
        outdated: Callable[[Sequence[str], Sequence[int]], NDArray[np.bool_] | None] | None = None,
    ) -> None:
        self.base, self.records = base, list(records)
        self._outdated = outdated
        if commits is None:
            commits = dict(zip(base.folders, base.commits, strict=True))
        homes = self._homes(commits)
        self.kept = np.array([i for i, folder in enumerate(homes) if folder], np.intp)
        self.compacted = len(self.kept) < len(homes)
        own = [record.header.folder for record in self.records]
        self.folders = list(dict.fromkeys([*(folder for folder in homes if folder), *own]))
        self.commits = [commits[folder] for folder in self.folders]
        self.row_of = {folder: i for i, folder in enumerate(self.folders)}
        self._changed = set(own)
        self.names, self._kept_names = self._merge_names()
        self.fields = self._merge(base.fields, "fields")
        arrays = self._merge(base.array_fields, "array_fields")
        self.array_fields = [name for name in arrays if name not in self.fields]
        self.kernels = self._merge(base.slots[f"{VIEW}/key"], "kernels")
        self.model_fields = self._merge(base.slots[f"{VIEW}/model_status"], "model_fields")
        self.model_kernels = self._merge(base.slots[f"{VIEW}/model_key"], "model_kernels")

    def _homes(self, commits: Mapping[str, int]) -> list[str]:
        """Return the folder of each row on disk: its own, that of the model that replaced it, "" if it is gone."""
        base = self.base
        if all(folder in commits for folder in base.folders):
            return list(base.folders)
        known = set(base.folders)
        heirs = {r.header.model_id: r.header.folder for r in self.records if r.header.folder not in known}
        ids = base.of_models("model_id")
        return [f if f in commits else heirs.get(i, "") for f, i in zip(base.folders, ids, strict=True)]

    @cached_property
    def same_catalog(self) -> set[str]:
        """Folders of the records whose names, shapes and contents stand in the view on disk already.

        Not those of linked models, whose digests come to be known without a change of their files.
        """
        base = self.base
        if not base.contents:
            return set()
        known = dict(zip(base.folders, zip(base.contents, base.of_models("added"), strict=True), strict=True))
        headers = [record.header for record in self.records if not record.header.link]
        return {h.folder for h in headers if h.content and known.get(h.folder) == (h.content, h.added)}

    @property
    def n_base(self) -> int:
        """Models that have a place on disk already."""
        return len(self.kept)

    @property
    def objects(self) -> Objects:
        """Where the view lies."""
        return self.base.objects

    def forget_gone(self) -> list[str]:
        """Leave out fields that no model holds any more, and return them; only what a changed model lost is counted."""
        old = [record for record in self.records if self.row_of[record.header.folder] < self.n_base]
        fields = [("status", name) for name in (*self.fields, *self.array_fields)]
        fields += [("model_status", name) for name in self.model_fields]
        gone = [
            name
            for kind, name in fields
            if (self.compacted or any(_holds_nothing(record, kind, name) for record in old))
            and not (self.load(kind, name) != MISSING).any()
        ]
        for names in (self.fields, self.array_fields, self.model_fields):
            names[:] = [name for name in names if name not in gone]
        return gone

    def _merge(self, base: Sequence[str], kind: str) -> list[str]:
        return list(dict.fromkeys([*base, *(name for record in self.records for name in getattr(record, kind))]))

    def _merge_names(self) -> tuple[list[str], NDArray[np.intp]]:
        names = self.base.names
        kept = np.arange(len(names))
        if self.compacted and names:
            rows = self.base.load("row")
            assert rows is not None
            unchanged = [i for i in self.kept if self.base.folders[i] not in self._changed]
            kept = np.flatnonzero((rows[unchanged] >= 0).any(axis=0))
            names = [names[i] for i in kept]
        position = {name: i for i, name in enumerate(names)}
        for record in self.records:
            own = record.parameters.name
            record.columns = np.array([position.setdefault(name, len(position)) for name in own], np.intp)
        return list(position), kept

    def shape(self, kind: str) -> tuple[int, ...]:
        """Return the shape of a column of this kind."""
        shape = (len(self.folders), len(self.names))
        if kind == "cell":
            return (len(PARTS), *shape)
        return shape[:1] if kind.startswith("model_") or kind in PER_MODEL else shape

    def load(self, kind: str, name: str = "") -> NDArray[Any]:
        """Return a column."""
        if kind == "cell":
            return np.stack([self.load(part).astype(np.int32) for part in PARTS])
        spec = spec_of(kind, (), 0)
        shape = self.shape(kind)
        old = self.base.load(kind, name)
        if old is not None and not self.records and not self.compacted:
            return old
        out = np.full(shape, spec.fill_value, spec.numpy)
        if old is not None and len(self.kept):
            if len(shape) == 1:
                out[: len(self.kept)] = old[self.kept]
            else:
                part = old[np.ix_(self.kept, self._kept_names)] if self.compacted else old
                if kind == "canonical" and self.compacted:
                    part = _renumbered(part, self._kept_names, old.shape[1])
                out[: part.shape[0], : part.shape[1]] = part
        for record in self.records:
            row = self.row_of[record.header.folder]
            values = record.cells(kind, name)
            out[row] = spec.fill_value
            if values is not None and len(shape) == 1:
                out[row] = values[0]
            elif values is not None:
                out[row, record.columns] = values
        return out

    def outdated(self) -> NDArray[np.bool_] | None:
        """Return which models were written since the view was made; None if nothing was."""
        return None if self._outdated is None else self._outdated(self.folders, self.commits)

    def attrs(self, read_attrs: Callable[[str], Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the attributes of the fields' variables; where models differ, ``"mixed"``.

        `read_attrs` gives those of one model; it is asked where the disk says ``mixed``, or would have to.
        """
        others = [folder for folder in self.folders if folder not in self._changed]
        stored = self.base.attrs
        merged: dict[str, dict[str, Any]] = {}
        for name in [*self.fields, *self.array_fields, *self.model_fields]:
            found = [
                public_attrs(record.packed.attrs.get(name, {}))
                for record in self.records
                if any(name in held for held in (record.fields, record.array_fields, record.model_fields))
            ]
            known = stored.get(name)
            if others and known is not None:
                if found and (MIXED in known.values() or any(attrs != known for attrs in found)):
                    found += [public_attrs(attrs[name]) for attrs in map(read_attrs, others) if name in attrs]
                else:
                    found.append(known)
            merged[name] = _mixed(found)
        return merged

    def view(self, attrs: dict[str, dict[str, Any]]) -> View:
        """Return the view."""
        columns = {kind: self.load(kind) for kind in ("model_id", "step", "parent", "added")}
        return View(
            list(columns["model_id"]),
            self.names,
            columns["step"].astype(np.float64),
            list(columns["parent"]),
            list(columns["added"]),
            self,
            attrs,
        )

    def columns(self) -> Iterator[Column]:
        """Yield every column of the view."""
        yield from ((kind, "") for kind in (*PER_MODEL, *PER_CELL, "cell"))
        for kind, names in (
            ("value", self.fields),
            ("status", [*self.fields, *self.array_fields]),
            ("key", self.kernels),
            ("model_value", self.model_fields),
            ("model_status", self.model_fields),
            ("model_key", self.model_kernels),
        ):
            yield from ((kind, name) for name in names)


def _holds_nothing(record: Record, kind: str, name: str) -> bool:
    cells = record.cells(kind, name)
    return cells is None or bool((cells == MISSING).all())


MIXED = "mixed"
"""What an attribute says that differs between models."""


def _mixed(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for attrs in found:
        for key, value in attrs.items():
            merged[key] = value if merged.setdefault(key, value) == value else MIXED
    return merged


def _renumbered(part: NDArray[np.int32], kept: NDArray[np.intp], n: int) -> NDArray[np.int32]:
    place = np.full(n + 1, -1, np.int32)
    place[kept] = np.arange(len(kept))
    return place[part]


def spec_of(kind: str, shape: tuple[int, ...], turn: int) -> ArraySpec:
    """Return the spec of the array that holds a column (planes: of all of them)."""
    encoding = KEY_ENCODINGS[turn % len(KEY_ENCODINGS)]
    if kind == "cell":
        chunks: tuple[int, ...] = (len(PARTS), MODEL_CHUNK, NAME_CHUNK)
        return ArraySpec(shape, chunks, "int32", ("part", "model_id", "name"), "zstd", -1, {}, encoding)
    if kind in PER_CELL or kind in PARTS or kind == "value":
        of_part = ("", "bool", False) if kind == "analysed" else ("", "int32", -1)
        _, dtype, fill = PER_CELL.get(kind, of_part if kind in PARTS else ("", "float64", np.nan))
        return ArraySpec(shape, (MODEL_CHUNK, NAME_CHUNK), dtype, ("model_id", "name"), "zstd", fill, {}, encoding)
    if kind in PER_MODEL or kind == "model_value":
        _, dtype, fill = PER_MODEL.get(kind, ("", "float64", np.nan))
        return ArraySpec(shape, (MODEL_CHUNK,), dtype, ("model_id",), "zstd", fill, {}, encoding)
    _, dimension, dtype, fill = PLANES[kind]
    names = () if kind.startswith("model_") else ("name",)
    chunks = (1, MODEL_CHUNK, *([NAME_CHUNK] if names else []))
    return ArraySpec(shape, chunks, dtype, (dimension, "model_id", *names), "zstd", fill, {}, encoding)
