"""Results of one model: scalars packed by field, array fields by length, and the order in which they are written.

Before new values come, their keys are 0; after them, the keys. A process that is killed in between leaves values
that no key vouches for, never a key that vouches for other values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask import catalog
from diffract_dask.catalog import Parameters
from diffract_dask.errors import KernelRegistrationError, StoreError
from diffract_dask.fields import MISSING, Status
from diffract_dask.kernel import Keys
from diffract_dask.store.arrays import FLAT, STRING, ArraySpec, Grid, dumps, group_document, loads
from diffract_dask.store.objects import Objects
from diffract_dask.store.tables import Header, column_updates, content_of, text_column

__all__ = [
    "Commit",
    "Packed",
    "Stage",
    "commit_stages",
    "erase_stages",
    "read_arrays",
    "read_failures",
    "read_packed",
    "scalar_objects",
    "write_stages",
]

Index = NDArray[np.intp]

_SLOTS = 256  # fields and kernels that fit before shapes must grow; unused ones take no space
_SLOT_CHUNK = 128
_NAME_CHUNK = 4096
_WHOLE_BYTES = 64 * 2**20
_FAILURES = "scalars/status/failures.json"  # in an array's folder, where readers of Zarr groups do not look

RESERVED_FIELDS = frozenset(
    [
        *("model_id", "name", "field", "kernel", "status", "key", "weights"),
        *("model_field", "model_kernel", "model_status", "model_key"),
        *("step", "parent", "added", "type", "rows", "cols", "layer", "block", "module", "role"),
    ]
)
"""Names that variables and dimensions of the store have already."""


@dataclass
class Commit:
    """New results of one model. Indices are positions in its parameters' table.

    Parameters
    ----------
    model_id : str
    values : dict of field to (indices, float64 values, uint8 statuses)
        Slice-level scalars. The statuses of array fields come here too, with NaN as value.
    arrays : dict of field to (indices, list of arrays)
        Slice-level array fields.
    keys : dict of kernel to (indices, uint64 keys)
    model_values : dict of field to (value, status)
    model_keys : dict of kernel to key
    digests : tuple of (indices, list of str), optional
        Of linked parameters that were read in full for the first time.
    failures : dict of (name, kernel) to str
        Why a kernel failed on a parameter (``""`` for the model itself); an empty text clears it.
    attrs : dict of field to dict
        Attributes of the field's variable: ``long_name``, ``units``, ``kernel``, ``kernel_version``, ``params``,
        ``dtype``; ``dims`` of an array field where its shape does not tell.
    """

    model_id: str
    values: dict[str, tuple[Index, NDArray[np.float64], NDArray[np.uint8]]] = field(default_factory=dict)
    arrays: dict[str, tuple[Index, list[NDArray[Any]]]] = field(default_factory=dict)
    keys: dict[str, tuple[Index, Keys]] = field(default_factory=dict)
    model_values: dict[str, tuple[float, int]] = field(default_factory=dict)
    model_keys: dict[str, int] = field(default_factory=dict)
    digests: tuple[Index, list[str]] | None = None
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    attrs: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Stage:
    """Objects that may be written in any order; those of the next stage come after all of them."""

    objects: dict[str, bytes | memoryview | None] = field(default_factory=dict)
    counts: dict[str, bytes] = field(default_factory=dict)
    publish: dict[str, dict[str, bytes | memoryview]] = field(default_factory=dict)
    remove: list[str] = field(default_factory=list)

    @classmethod
    def merged(cls, stages: Iterable[Stage]) -> Stage:
        """Return one stage of those of several models."""
        whole = cls()
        for stage in stages:
            whole.objects.update(stage.objects)
            whole.counts.update(stage.counts)
            whole.publish.update(stage.publish)
            whole.remove += stage.remove
        return whole


def write_stages(objects: Objects, stages: Sequence[Stage], staging: Callable[[], str]) -> None:
    """Write stages in order."""
    for stage in stages:
        for key, count in stage.counts.items():
            objects.overwrite(key, count)
        for prefix, made in stage.publish.items():
            objects.publish(prefix, made, staging())
        if stage.objects:
            objects.set_many(stage.objects)
        for prefix in stage.remove:
            objects.delete_dir(prefix)


# ----------------------------------------------------------------------------------------------------- scalars


def _scalar_specs(n: int, n_fields: int, n_kernels: int) -> dict[str, ArraySpec]:
    names = min(max(n, 1), _NAME_CHUNK)
    by_field, by_kernel = (n_fields, n), (n_kernels, n)
    chunk, slot = (_SLOT_CHUNK, names), (_SLOT_CHUNK,)
    return {
        "value": ArraySpec(by_field, chunk, "float64", ("field", "name"), "lz4", encoding=FLAT),
        "status": ArraySpec(by_field, chunk, "uint8", ("field", "name"), "lz4", MISSING, encoding=FLAT),
        "key": ArraySpec(by_kernel, chunk, "uint64", ("kernel", "name"), "lz4", encoding=FLAT),
        "model_value": ArraySpec((n_fields,), slot, "float64", ("field",), "lz4", encoding=FLAT),
        "model_status": ArraySpec((n_fields,), slot, "uint8", ("field",), "lz4", MISSING, encoding=FLAT),
        "model_key": ArraySpec((n_kernels,), slot, "uint64", ("kernel",), "lz4", encoding=FLAT),
        "field": ArraySpec((n_fields,), slot, STRING, ("field",), encoding=FLAT),
        "kernel": ArraySpec((n_kernels,), slot, STRING, ("kernel",), encoding=FLAT),
    }


def _name_objects(names: NDArray[np.object_]) -> dict[str, bytes | memoryview]:
    spec = ArraySpec((len(names),), (max(len(names), 1),), STRING, ("name",), encoding=FLAT)
    return {f"name/{key}": data for key, data in spec.objects(names).items()}


def scalar_objects(names: NDArray[np.object_]) -> dict[str, bytes | memoryview]:
    """Return the objects of empty scalars for the parameters `names`."""
    found: dict[str, bytes | memoryview] = {"scalars/zarr.json": _scalar_group([_SLOTS, _SLOTS], {})}
    for name, spec in _scalar_specs(len(names), _SLOTS, _SLOTS).items():
        found[f"scalars/{name}/zarr.json"] = dumps(spec.document())
    return {**found, **{f"scalars/{key}": data for key, data in _name_objects(names).items()}}


def _scalar_group(capacity: Sequence[int], attrs: Mapping[str, Any]) -> bytes:
    return dumps(group_document({"capacity": list(capacity), "fields": dict(attrs)}))


class _Scalars:
    """The packed scalars of one model while they change."""

    def __init__(self, objects: Objects, prefix: str, n: int) -> None:
        self.objects, self.prefix, self.n = objects, f"{prefix}/scalars", n
        attributes = loads(objects.get(f"{self.prefix}/zarr.json")).get("attributes", {})
        self.capacity: list[int] = list(attributes.get("capacity", [_SLOTS, _SLOTS]))
        self.attrs: dict[str, dict[str, Any]] = dict(attributes.get("fields", {}))
        self._stored = _scalar_group(self.capacity, self.attrs)
        self.specs = _scalar_specs(n, *self.capacity)
        self.slots = {name: self._read_slots(name) for name in ("field", "kernel")}
        self._known = {name: len(slots) for name, slots in self.slots.items()}
        self.grids: dict[str, Grid] = {}

    def _read_slots(self, name: str) -> list[str]:
        return [slot for slot in self.specs[name].read(self.objects, f"{self.prefix}/{name}") if slot]

    def slot(self, dimension: str, name: str) -> int:
        """Return the place of a field or kernel, a new one if it has none."""
        slots = self.slots[dimension]
        if name not in slots:
            if dimension == "field" and (not name.isidentifier() or name in RESERVED_FIELDS):
                raise KernelRegistrationError(
                    f"a field cannot be stored under the name {name!r}; give an identifier that is none of "
                    f"{', '.join(sorted(RESERVED_FIELDS))}"
                )
            slots.append(name)
            self._grow()
        return slots.index(name)

    def _grow(self) -> None:
        needed = [len(self.slots["field"]), len(self.slots["kernel"])]
        capacity = [have * 2 if want > have else have for have, want in zip(self.capacity, needed, strict=True)]
        if capacity != self.capacity:
            self.capacity = capacity
            self.specs = _scalar_specs(self.n, *capacity)
            for name, grid in self.grids.items():
                grid.spec = self.specs[name]

    def grid(self, name: str) -> Grid:
        """Return the chunks of one array."""
        if name not in self.grids:
            self.grids[name] = Grid(self.objects, f"{self.prefix}/{name}", self.specs[name])
        return self.grids[name]

    def changed(self, *names: str) -> dict[str, bytes | memoryview | None]:
        """Return the objects to write of these arrays."""
        return {key: data for name in names if name in self.grids for key, data in self.grids[name].changed().items()}

    def layout(self) -> dict[str, bytes | memoryview | None]:
        """Return the objects to write for new slots and attributes; they must be there before values are."""
        found: dict[str, bytes | memoryview | None] = {}
        for name, slots in self.slots.items():
            if len(slots) > self._known[name]:
                made = self.specs[name].objects(_padded(slots, self.specs[name].shape[0]), document=False)
                found.update({f"{self.prefix}/{name}/{key}": data for key, data in made.items()})
        document = _scalar_group(self.capacity, self.attrs)
        if document != self._stored:
            if self.capacity != loads(self._stored)["attributes"]["capacity"]:
                found.update({f"{self.prefix}/{name}/zarr.json": dumps(s.document()) for name, s in self.specs.items()})
            found[f"{self.prefix}/zarr.json"] = document
        return found


def _padded(slots: Sequence[str], n: int) -> NDArray[np.object_]:
    return text_column([*slots, *[""] * (n - len(slots))], n)


@dataclass
class Packed:
    """All scalars of one model, as read.

    Parameters
    ----------
    fields, kernels : list of str
    value, status, key : arrays (fields, n), (fields, n), (kernels, n)
    model_value, model_status, model_key : arrays (fields,), (fields,), (kernels,)
    attrs : dict
        Attributes by field; array fields have ``dims``.
    """

    fields: list[str]
    kernels: list[str]
    value: NDArray[np.float64]
    status: NDArray[np.uint8]
    key: NDArray[np.uint64]
    model_value: NDArray[np.float64]
    model_status: NDArray[np.uint8]
    model_key: NDArray[np.uint64]
    attrs: dict[str, dict[str, Any]]


_RETRIES = 5


def read_packed(objects: Objects, prefix: str, n: int) -> Packed:
    """Return all scalars of one model, values and keys that belong together.

    Keys are read before and after the values: a writer sets them to 0 before it touches a value. Where they
    differ still after a few tries, they are given as 0, unknown.
    """
    where = f"{prefix}/scalars"
    attributes = loads(objects.get(f"{where}/zarr.json")).get("attributes", {})
    specs = _scalar_specs(n, *attributes.get("capacity", [_SLOTS, _SLOTS]))
    slots = _read_chunks(objects, where, specs, "field", "kernel")
    fields, kernels = ([name for name in found if name] for found in slots)
    specs = _scalar_specs(n, len(fields), len(kernels))
    keys = _read_chunks(objects, where, specs, "key", "model_key")
    for _ in range(_RETRIES):
        values = _read_chunks(objects, where, specs, "value", "status", "model_value", "model_status")
        again = _read_chunks(objects, where, specs, "key", "model_key")
        torn = [before != after for before, after in zip(keys, again, strict=True)]
        keys = again
        if not any(part.any() for part in torn):
            break
    else:
        for part, changed in zip(keys, torn, strict=True):
            part[changed] = 0
    value, status, model_value, model_status = values
    attrs = attributes.get("fields", {})
    return Packed(fields, kernels, value, status, keys[0], model_value, model_status, keys[1], attrs)


def _read_chunks(objects: Objects, where: str, specs: Mapping[str, ArraySpec], *names: str) -> list[NDArray[Any]]:
    """Return several arrays, read in one go."""
    indices = [list(np.ndindex(*specs[name].grid)) for name in names]
    keys = [f"{where}/{name}/{specs[name].key(i)}" for name, mine in zip(names, indices, strict=True) for i in mine]
    found = iter(objects.get_many(keys))
    return [
        specs[name].assemble({index: next(found) for index in mine}) for name, mine in zip(names, indices, strict=True)
    ]


# ------------------------------------------------------------------------------------------------ array fields


def _home(dims: Sequence[str], rows: int, cols: int) -> str:
    """Return the group, below the model, of an array field of slices of this shape."""
    return f"spectra/{min(rows, cols)}" if tuple(dims) == ("sval",) else f"vectors/{rows}x{cols}"


def _infer_dims(shape: tuple[int, ...], rows: int, cols: int) -> tuple[str, ...]:
    size = {"sval": min(rows, cols), "row": rows, "col": cols}
    for dims in (("sval",), ("row",), ("col",), ("row", "sval"), ("col", "sval"), ("row", "col")):
        if shape == tuple(size[dim] for dim in dims):
            return dims
    if len(shape) == 1 and shape[0] < min(rows, cols):
        return ("sval",)  # the leading part of a spectrum; padded with NaN
    raise StoreError(
        f"an array of shape {shape} fits no slice of {rows} × {cols}: its dimensions are sval ({min(rows, cols)}), row "
        "and col"
    )


class _ArrayField:
    """One array field of the slices of one shape (spectra: of one length) of a model."""

    def __init__(self, parameters: Parameters, dims: Sequence[str], row: int) -> None:
        rows, cols = int(parameters.rows[row]), int(parameters.cols[row])
        short = np.minimum(parameters.rows, parameters.cols)
        self.home = _home(dims, rows, cols)
        if self.home.startswith("spectra/"):
            mine = parameters.analysed & (short == min(rows, cols))
        else:
            mine = parameters.analysed & (parameters.rows == rows) & (parameters.cols == cols)
        self.members = np.flatnonzero(mine)
        size = {"sval": min(rows, cols), "row": rows, "col": cols}
        inner = tuple(size[dim] for dim in dims)
        whole = len(dims) == 1 and len(self.members) * inner[0] * 8 <= _WHOLE_BYTES
        n = len(self.members)
        self.spec = ArraySpec(
            (n, *inner), (n if whole else 1, *inner), "float64", ("name", *dims), "lz4" if len(dims) == 1 else "none"
        )

    def positions(self, indices: Index) -> Index:
        return np.searchsorted(self.members, indices)


def _by_home(parameters: Parameters, dims: Sequence[str], indices: Index) -> Iterator[Index]:
    """Yield the positions within `indices` that lie in one group each."""
    homes = text_column(
        (_home(dims, r, c) for r, c in zip(parameters.rows[indices], parameters.cols[indices], strict=True)),
        len(indices),
    )
    for home in dict.fromkeys(homes):
        yield np.flatnonzero(homes == home)


def _array_stage(
    objects: Objects, prefix: str, parameters: Parameters, name: str, dims: Sequence[str], indices: Index,
    arrays: Sequence[NDArray[Any]], stage: Stage,
) -> None:  # fmt: skip
    """Add to a stage what storing one array field takes."""
    for chosen in _by_home(parameters, dims, indices):
        place = _ArrayField(parameters, dims, int(indices[chosen[0]]))
        at = place.positions(indices[chosen])
        where = f"{prefix}/{place.home}"
        made: dict[str, bytes | memoryview] = {}
        size = place.spec.chunks[0]
        exists = objects.exists(f"{where}/{name}/zarr.json")
        for chunk in np.unique(at // size):
            key = place.spec.key((int(chunk), *[0] * len(dims)))
            old = objects.get(f"{where}/{name}/{key}") if exists and size > 1 else None
            block = place.spec.decode(old)
            for position, i in zip(at, chosen, strict=True):
                if position // size == chunk:
                    block[position - chunk * size] = _fitted(arrays[i], place.spec.shape[1:], name)
            made[key] = place.spec.encode(block)
        if exists:
            stage.objects.update({f"{where}/{name}/{key}": data for key, data in made.items()})
            continue
        made["zarr.json"] = dumps(place.spec.document())
        top = place.home.partition("/")[0]
        if not objects.exists(f"{prefix}/{top}/zarr.json"):
            stage.objects[f"{prefix}/{top}/zarr.json"] = dumps(group_document())
        if where in stage.publish:
            stage.publish[where].update({f"{name}/{key}": data for key, data in made.items()})
        elif not objects.exists(f"{where}/zarr.json"):
            group: dict[str, bytes | memoryview] = {"zarr.json": dumps(group_document())}
            group.update(_name_objects(parameters.name[place.members]))
            stage.publish[where] = {**group, **{f"{name}/{key}": data for key, data in made.items()}}
        else:
            stage.publish[f"{where}/{name}"] = made


def _fitted(array: NDArray[Any], inner: tuple[int, ...], name: str) -> NDArray[np.float64]:
    """Return an array padded with NaN at the end to the size that its slice gives."""
    array = np.asarray(array, np.float64)
    if array.shape == inner:
        return array
    if array.ndim != len(inner) or any(have > room for have, room in zip(array.shape, inner, strict=True)):
        raise StoreError(f"field {name!r}: an array of shape {array.shape} where {inner} is the largest that fits")
    padded = np.full(inner, np.nan)
    padded[tuple(slice(0, have) for have in array.shape)] = array
    return padded


def read_arrays(
    objects: Objects, prefix: str, parameters: Parameters, name: str, dims: Sequence[str], indices: Index
) -> list[NDArray[np.float64]]:
    """Return the stored arrays of one field, NaN where nothing was stored."""
    found: dict[int, NDArray[np.float64]] = {}
    for chosen in _by_home(parameters, dims, indices):
        place = _ArrayField(parameters, dims, int(indices[chosen[0]]))
        at = place.positions(indices[chosen])
        size = place.spec.chunks[0]
        chunks = np.unique(at // size)
        keys = [f"{prefix}/{place.home}/{name}/{place.spec.key((int(c), *[0] * len(dims)))}" for c in chunks]
        for chunk, data in zip(chunks, objects.get_many(keys), strict=True):
            block = place.spec.decode(data)
            for position, i in zip(at, chosen, strict=True):
                if position // size == chunk:
                    found[int(i)] = block[position - chunk * size]
    return [found[i] for i in range(len(indices))]


# --------------------------------------------------------------------------------------------------- committing


def read_failures(objects: Objects, prefix: str) -> dict[tuple[str, str], str]:
    """Return why kernels failed, by (name, kernel)."""
    data = objects.get(f"{prefix}/{_FAILURES}")
    return {(name, kernel): reason for name, kernel, reason in json.loads(data)} if data else {}


def _failure_object(failures: Mapping[tuple[str, str], str]) -> bytes | None:
    rows = [[name, kernel, reason] for (name, kernel), reason in failures.items() if reason]
    return json.dumps(rows, ensure_ascii=False).encode() if rows else None


def _count_stage(header: Header) -> Stage:
    return Stage(counts={header.count_key: header.count_bytes()})


def commit_stages(
    objects: Objects, header: Header, n: int, parameters: Callable[[], Parameters], commit: Commit,
    prefix: str | None = None,
) -> tuple[list[Stage], Header]:  # fmt: skip
    """Return what writes a commit, in stages, and the model's header afterwards.

    `n` is the number of parameters; `prefix` another place of the model (staging).
    """
    prefix = prefix or header.prefix
    done = header.done()
    scalars = _Scalars(objects, prefix, n)
    before, values, keys = Stage(), Stage(), Stage()
    slots = {kernel: scalars.slot("kernel", kernel) for kernel in {**commit.keys, **commit.model_keys}}
    for kernel, (indices, _) in commit.keys.items():
        scalars.grid("key").put((slots[kernel],), _checked(indices, n), np.zeros(len(indices), np.uint64))
    if commit.model_keys:
        at = np.array([slots[kernel] for kernel in commit.model_keys])
        scalars.grid("model_key").put((), at, np.zeros(len(at), np.uint64))
    before.objects.update(scalars.changed("key", "model_key"))
    for name, (indices, numbers, status) in commit.values.items():
        slot = scalars.slot("field", name)
        scalars.grid("value").put((slot,), _checked(indices, n), np.asarray(numbers, np.float64))
        scalars.grid("status").put((slot,), indices, np.asarray(status, np.uint8))
    if commit.model_values:
        at = np.array([scalars.slot("field", name) for name in commit.model_values])
        numbers, status = (np.array(x) for x in zip(*commit.model_values.values(), strict=True))
        scalars.grid("model_value").put((), at, numbers.astype(np.float64))
        scalars.grid("model_status").put((), at, status.astype(np.uint8))
    for name, attrs in commit.attrs.items():
        held = {"dims": scalars.attrs[name]["dims"]} if "dims" in scalars.attrs.get(name, {}) else {}
        scalars.attrs[name] = {**held, **{k: list(v) if k == "dims" else v for k, v in attrs.items()}}
    for name, (indices, arrays) in commit.arrays.items():
        if not len(indices):
            continue
        scalars.slot("field", name)
        table, indices = parameters(), _checked(indices, n)
        rows, cols = int(table.rows[indices[0]]), int(table.cols[indices[0]])
        dims = commit.attrs.get(name, {}).get("dims") or _infer_dims(np.shape(arrays[0]), rows, cols)
        scalars.attrs[name] = {**scalars.attrs.get(name, {}), "dims": list(dims)}
        _array_stage(objects, prefix, table, name, dims, indices, arrays, values)
    before.objects.update(scalars.layout())
    values.objects.update(scalars.changed("value", "status", "model_value", "model_status"))
    if commit.failures:
        merged = {**read_failures(objects, prefix), **commit.failures}
        values.objects[f"{prefix}/{_FAILURES}"] = _failure_object(merged)
    if commit.digests is not None:
        done = _digest_stage(prefix, done, parameters(), *commit.digests, values)
        keys.objects[f"{prefix}/zarr.json"] = done.object()  # after the columns that its revision stands for
    for kernel, (indices, new) in commit.keys.items():
        scalars.grid("key").put((slots[kernel],), np.asarray(indices, np.intp), np.asarray(new, np.uint64))
    if commit.model_keys:
        at = np.array([slots[kernel] for kernel in commit.model_keys])
        scalars.grid("model_key").put((), at, np.array(list(commit.model_keys.values()), np.uint64))
    keys.objects.update(scalars.changed("key", "model_key"))
    return [_count_stage(header.started()), before, values, keys, _count_stage(done)], done


def _checked(indices: Any, n: int) -> Index:
    at = np.asarray(indices, np.intp)
    if len(at) and (at.min() < 0 or at.max() >= n):
        raise StoreError(f"positions {at.min()} to {at.max()} are given for a model of {n} parameters")
    return at


def _digest_stage(
    prefix: str, header: Header, parameters: Parameters, indices: Index, digests: Sequence[str], stage: Stage
) -> Header:
    """Add the columns that digests change: they may show which parameters are tied."""
    parameters = parameters.select(np.arange(len(parameters)))  # a copy: the caller's may be shared
    parameters.digest[np.asarray(indices, np.intp)] = text_column(digests, len(digests))
    if not parameters.sharing_known:
        parameters.tied_to[:] = ""
        catalog.tie(parameters)
    made = column_updates(parameters, ("digest", "tied_to"))
    stage.objects.update({f"{prefix}/{key}": data for key, data in made.items()})
    return replace(header, revision=header.revision + 1, content=content_of(parameters, link=header.link))


def erase_stages(
    objects: Objects, header: Header, n: int, parameters: Callable[[], Parameters], fields: Iterable[str],
    kernels: Iterable[str], indices: Index | None,
) -> tuple[list[Stage], Header]:  # fmt: skip
    """Return what removes stored values: keys to 0 first. `indices` None: of all parameters and of the model."""
    done = header.done()
    scalars = _Scalars(objects, header.prefix, n)
    whole = indices is None
    at = np.arange(n) if indices is None else _checked(indices, n)
    before, after = Stage(), Stage()
    gone = [name for name in kernels if name in scalars.slots["kernel"]]
    for slot in (scalars.slots["kernel"].index(name) for name in gone):
        scalars.grid("key").put((slot,), at, np.zeros(len(at), np.uint64))
        if whole:
            scalars.grid("model_key").put((), np.array([slot]), np.zeros(1, np.uint64))
    before.objects.update(scalars.changed("key", "model_key"))
    for name in fields:
        if name not in scalars.slots["field"]:
            continue
        slot = scalars.slots["field"].index(name)
        scalars.grid("value").put((slot,), at, np.full(len(at), np.nan))
        scalars.grid("status").put((slot,), at, np.full(len(at), MISSING, np.uint8))
        if whole:
            scalars.grid("model_value").put((), np.array([slot]), np.array([np.nan]))
            scalars.grid("model_status").put((), np.array([slot]), np.array([MISSING], np.uint8))
        dims = scalars.attrs.get(name, {}).get("dims")
        if dims:
            _erase_arrays(objects, header.prefix, parameters(), name, dims, None if whole else at, after)
    after.objects.update(scalars.changed("value", "status", "model_value", "model_status"))
    failures = read_failures(objects, header.prefix)
    if failures:
        names = {"", *parameters().name} if whole else set(parameters().name[at])
        kept = {key: reason for key, reason in failures.items() if key[1] not in gone or key[0] not in names}
        after.objects[f"{header.prefix}/{_FAILURES}"] = _failure_object(kept)
    return [_count_stage(header.started()), before, after, _count_stage(done)], done


def _erase_arrays(
    objects: Objects, prefix: str, parameters: Parameters, name: str, dims: Sequence[str], indices: Index | None,
    stage: Stage,
) -> None:  # fmt: skip
    """Add what removes an array field: its folders, or NaN in the place of some slices."""
    everything = np.flatnonzero(parameters.analysed)
    for chosen in _by_home(parameters, dims, everything):
        place = _ArrayField(parameters, dims, int(everything[chosen[0]]))
        where = f"{prefix}/{place.home}/{name}"
        if not objects.exists(f"{where}/zarr.json"):
            continue
        if indices is None:
            stage.objects[f"{where}/zarr.json"] = None
            stage.remove.append(where)
            continue
        mine = indices[np.isin(indices, place.members)]
        if len(mine):
            nothing = [np.full(place.spec.shape[1:], np.nan)] * len(mine)
            _array_stage(objects, prefix, parameters, name, dims, mine, nothing, stage)


def ingest_commit(model_id: str, given: Mapping[str, tuple[Any, Any]]) -> Commit:
    """Return the commit of values that the user gives: status INGESTED; a kernel's key is for the caller to clear."""
    commit = Commit(model_id)
    for name, (indices, numbers) in given.items():
        at = np.atleast_1d(np.asarray(indices, np.intp))
        values = np.broadcast_to(np.asarray(numbers, np.float64), at.shape)
        commit.values[name] = (at, values, np.full(at.shape, Status.INGESTED, np.uint8))
    return commit
