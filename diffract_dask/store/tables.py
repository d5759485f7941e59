"""What the store keeps of a model beside its weights and results: the group's attributes and the parameters' table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask import catalog
from diffract_dask.catalog import Parameters
from diffract_dask.errors import InvalidIdentifierError, SessionError
from diffract_dask.store.arrays import FLAT, STRING, ArraySpec, dumps, group_document, loads
from diffract_dask.store.objects import Objects

__all__ = [
    "MODELS",
    "RESERVED_ATTRS",
    "Header",
    "check_attrs",
    "check_id",
    "check_step",
    "column_updates",
    "content_of",
    "count_objects",
    "folder_of",
    "parameter_objects",
    "read_columns",
    "read_counts",
    "read_header",
    "read_headers",
    "read_parameters",
    "text_column",
]

MODELS = "models"

RESERVED_ATTRS = (
    "model_id", "source", "framework", "added", "link", "count", "revision", "content", "replaces"
)  # fmt: skip
"""Attributes of a model that the store itself keeps; ``step`` and ``parent`` can be set like a user's own."""


# ------------------------------------------------------------------------------------------------------ header


@dataclass(frozen=True)
class Header:
    """The attributes of a model's group, and its count of writes.

    Parameters
    ----------
    folder : str
        Below ``models/``.
    model_id : str
    step : float, optional
    parents : tuple of str
    source, framework, added : str
        `added` is the time, ISO 8601 in UTC.
    link : bool
        Whether the weights stay in their files.
    count : int
        Number of parameters.
    commits : int
        Count of writes to this model; odd while one goes on, or after a writer was killed in one. It is an array of
        its own, ``commits``, because that can be overwritten in place.
    revision : int
        Count of changes to the parameters' table.
    content : str
        Hash of names and digests, equal for models of the same content; empty if unknown.
    replaces : str
        Folder of the model that this one replaces; it is ignored and removed by the next writer.
    attrs : dict
        The user's, and what the source said under ``checkpoint``.
    """

    folder: str
    model_id: str
    step: float | None = None
    parents: tuple[str, ...] = ()
    source: str = ""
    framework: str = ""
    added: str = ""
    link: bool = False
    count: int = 0
    commits: int = 0
    revision: int = 0
    content: str = ""
    replaces: str = ""
    attrs: dict[str, Any] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """Where the model lies."""
        return f"{MODELS}/{self.folder}"

    def attributes(self) -> dict[str, Any]:
        """Return the group's attributes."""
        own = {name: getattr(self, name) for name in RESERVED_ATTRS}
        step = {} if self.step is None else {"step": self.step}
        return {**self.attrs, **step, "parent": list(self.parents), **own}

    def object(self) -> bytes:
        """Return the group's metadata object."""
        return dumps(group_document(self.attributes()))

    @property
    def state(self) -> tuple[str, str, int, str]:
        """What a parameters' table belongs to: it is the same for equal states."""
        return self.folder, self.added, self.revision, self.model_id

    @property
    def count_key(self) -> str:
        """Where the count of writes is."""
        return f"{self.prefix}/{_COUNT}"

    def count_bytes(self) -> bytes:
        """Return the object of the count of writes."""
        return np.uint64(self.commits).tobytes()

    def started(self) -> Header:
        """Return the header while a write goes on: with an odd count."""
        return replace(self, commits=self.commits | 1)

    def done(self) -> Header:
        """Return the header after a write: with the next even count."""
        return replace(self, commits=(self.commits | 1) + 1)

    @classmethod
    def parse(cls, folder: str, data: bytes, count: bytes | None) -> Header:
        """Return the header in a group's metadata object, which was read after the object of its count."""
        attrs = dict(loads(data)["attributes"])
        own = {name: attrs.pop(name) for name in RESERVED_ATTRS}
        step, parents = attrs.pop("step", None), tuple(attrs.pop("parent", ()))
        commits = int.from_bytes(count or b"", "little")
        return cls(folder=folder, step=step, parents=parents, commits=commits, attrs=attrs, **own)

    def public(self) -> dict[str, Any]:
        """Return what a user sees as the model's attributes."""
        shown = {name: getattr(self, name) for name in ("model_id", "source", "framework", "added", "link")}
        return {**shown, "step": self.step, "parent": list(self.parents), **self.attrs}

    def with_attrs(self, changes: Mapping[str, Any]) -> Header:
        """Return the header with the user's attributes changed; None removes one.

        Raises
        ------
        SessionError
            A name that the store keeps itself, or a value that JSON cannot hold.
        """
        changes = dict(changes)
        step, parents = self.step, self.parents
        if "step" in changes:
            step = check_step(changes.pop("step"))
        if "parent" in changes:
            parent = changes.pop("parent")
            parents = (parent,) if isinstance(parent, str) else tuple(parent or ())
        attrs = {k: v for k, v in {**self.attrs, **check_attrs(changes)}.items() if v is not None}
        return replace(self, step=step, parents=parents, attrs=attrs)


def check_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes as JSON values; SessionError for reserved names and for what JSON cannot hold."""
    checked: dict[str, Any] = {}
    for name, value in attrs.items():
        if name in RESERVED_ATTRS or not name:
            raise SessionError(
                f"attribute {name!r} is kept by the store itself ({', '.join(RESERVED_ATTRS)}); choose another name"
            )
        try:
            checked[name] = json.loads(json.dumps(value, default=_plain, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise SessionError(
                f"attribute {name!r} must be a JSON value (text, finite number, list, dict, null): {error}"
            ) from error
    return checked


def check_step(step: Any) -> float | None:
    """Return a step as a finite float, None for none; SessionError otherwise."""
    if step is None:
        return None
    try:
        number = float(step)
    except (TypeError, ValueError):
        number = np.nan
    if not np.isfinite(number):
        raise SessionError(f"step is {step!r}; give a finite number, or None")
    return number


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{value!r} is a {type(value).__name__}")


def check_id(model_id: Any) -> str:
    """Return a model id; InvalidIdentifierError unless it is non-empty printable text."""
    if not isinstance(model_id, str) or not model_id or not model_id.isprintable():
        raise InvalidIdentifierError(f"model_id is {model_id!r}; give non-empty printable text")
    return model_id


_COUNT = "commits/c"
_COUNT_SPEC = ArraySpec((), (), "uint64", (), attrs={"long_name": "Number of the last write; odd while one goes on"})


def count_objects(header: Header) -> dict[str, bytes | memoryview]:
    """Return the objects of the count of writes of a new model."""
    return {"commits/zarr.json": dumps(_COUNT_SPEC.document()), _COUNT: header.count_bytes()}


def read_counts(objects: Objects, folders: Sequence[str]) -> list[int]:
    """Return the counts of writes of models, -1 for those that are gone."""
    found = objects.get_many([f"{MODELS}/{folder}/{_COUNT}" for folder in folders])
    return [int.from_bytes(data, "little") if data else -1 for data in found]


_PLAIN = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d|zarr\.json|c)(\..*)?|.*\.|.*\.partial")


def folder_of(model_id: str, taken: Iterable[str] = ()) -> str:
    """Return the folder name of a model: its id if every file system can hold it, else a slug and a hash.

    >>> folder_of("run-2"), folder_of("Run 2/ä")
    ('run-2', 'run-2-823d63ba')
    """
    taken = set(taken)
    if _PLAIN.fullmatch(model_id) and not _RESERVED.fullmatch(model_id) and model_id not in taken:
        return model_id
    slug = re.sub(r"[^a-z0-9]+", "-", model_id.lower()).strip("-")[:40].strip("-") or "model"
    turn = 0
    while True:
        salt = f"{model_id}\0{turn}" if turn else model_id
        folder = f"{slug}-{blake2b(salt.encode(), digest_size=4).hexdigest()}"
        if folder not in taken:
            return folder
        turn += 1


def read_headers(objects: Objects) -> tuple[dict[str, Header], list[str]]:
    """Return the headers of all published models by folder, and the folders of those that others replace."""
    folders = [name for name in objects.list_dir(MODELS) if name != "zarr.json"]
    counts = objects.get_many([f"{MODELS}/{folder}/{_COUNT}" for folder in folders])
    found = objects.get_many([f"{MODELS}/{folder}/zarr.json" for folder in folders])
    rows = zip(folders, found, counts, strict=True)
    headers = {folder: Header.parse(folder, data, count) for folder, data, count in rows if data}
    replaced = [header.replaces for header in headers.values() if header.replaces in headers]
    for folder in replaced:
        headers.pop(folder, None)
    return headers, replaced


def read_header(objects: Objects, folder: str) -> Header | None:
    """Return the header of one model, None if it is gone."""
    count = objects.get(f"{MODELS}/{folder}/{_COUNT}")
    data = objects.get(f"{MODELS}/{folder}/zarr.json")
    return Header.parse(folder, data, count) if data is not None else None


def read_columns(objects: Objects, prefix: str, n: int, columns: Sequence[str]) -> list[NDArray[Any]]:
    """Return some columns of the parameters' table of a model with `n` parameters, as they are stored."""
    specs = [_spec(column, n) for column in columns]
    found = objects.get_many([f"{prefix}/parameters/{c}/{s.key((0,))}" for c, s in zip(columns, specs, strict=True)])
    return [spec.decode(data)[:n] for spec, data in zip(specs, found, strict=True)]


# -------------------------------------------------------------------------------------------------- parameters

_KIND: dict[str, str] = {
    **dict.fromkeys(("rows", "cols", "nbytes", "index", "offset", "size", "mtime_ns"), "int64"),
    "used": "int8",
}
COLUMNS = tuple(f.name for f in fields(Parameters))
_ABSENT: dict[str, Any] = {"index": -1, "offset": -1, "size": -1, "mtime_ns": -1, "used": -1}

_TO_TEXT: dict[str, Callable[[Any], str]] = {
    "shape": lambda shape: "x".join(map(str, shape)),
    "attrs": lambda attrs: json.dumps(attrs, ensure_ascii=False, default=_plain) if attrs else "",
}
_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "shape": lambda text: tuple(map(int, text.split("x"))) if text else (),
    "attrs": lambda text: json.loads(text) if text else {},
}


def column_updates(parameters: Parameters, columns: Iterable[str]) -> dict[str, bytes | None]:
    """Return the chunks of columns that change, None for those that hold nothing any more."""
    found: dict[str, bytes | None] = {}
    made = parameter_objects(parameters, columns)
    for column in columns:
        key = f"parameters/{column}/{_spec(column, len(parameters)).key((0,))}"
        metadata = f"parameters/{column}/zarr.json"
        if key in made:
            found[metadata] = bytes(made[metadata])
        found[key] = bytes(made[key]) if key in made else None
    return found


def text_column(values: Iterable[Any], n: int) -> NDArray[np.object_]:
    """Return an object array of length `n`, entry by entry: tuples and dicts stay whole."""
    out = np.empty(n, object)
    for i, value in enumerate(values):
        out[i] = value
    return out


def _spec(column: str, n: int) -> ArraySpec:
    dtype = _KIND.get(column, STRING)
    fill = None if dtype == STRING else _ABSENT.get(column, 0)
    return ArraySpec((n,), (max(n, 1),), dtype, ("name",), "zstd", fill, encoding=FLAT)


def parameter_objects(parameters: Parameters, columns: Iterable[str] = COLUMNS) -> dict[str, bytes | memoryview]:
    """Return the objects of a parameters' table; columns that hold nothing are left out, but for ``name``."""
    n = len(parameters)
    attrs = {"sharing_known": parameters.sharing_known, "count": n}
    found: dict[str, bytes | memoryview] = {"parameters/zarr.json": dumps(group_document(attrs))}
    for column in columns:
        values = getattr(parameters, column)
        if column in _TO_TEXT:
            values = text_column(map(_TO_TEXT[column], values), n)
        spec = _spec(column, n)
        made = spec.objects(values)
        if len(made) > 1 or column == "name":
            found.update({f"parameters/{column}/{key}": data for key, data in made.items()})
    return found


def read_parameters(objects: Objects, prefix: str, model_id: str) -> Parameters:
    """Return the parameters' table of the model at `prefix`; uids are made from the present model id."""
    attrs = loads(objects.require(f"{prefix}/parameters/zarr.json"))["attributes"]
    n = int(attrs["count"])
    columns = dict(zip(COLUMNS, read_columns(objects, prefix, n, COLUMNS), strict=True))
    for column, parse in _FROM_TEXT.items():
        columns[column] = text_column(map(parse, columns[column]), n)
    columns["uid"] = text_column((catalog.uid(model_id, name) for name in columns["name"]), n)
    parameters = Parameters(**columns)
    parameters.sharing_known = bool(attrs["sharing_known"])
    return parameters


def content_of(parameters: Parameters, *, link: bool) -> str:
    """Return a hash that is equal for models of the same content, empty where the content is not known.

    Copied models: over names, digests, and what has no digest by its shape and type. Linked ones: over the places
    in their files, which says the same without reading them.
    """
    order = np.argsort(parameters.name)
    if link:
        columns = ("name", "path", "offset", "size", "mtime_ns", "header")
        text = "\n".join("\0".join(str(getattr(parameters, c)[i]) for c in columns) for i in order)
        return "link:" + blake2b(text.encode(), digest_size=8).hexdigest()
    if (parameters.analysed & (parameters.digest == "")).any():
        return ""
    contents = [d or f"{s} {t}" for d, s, t in zip(parameters.digest, parameters.shape, parameters.dtype, strict=True)]
    rows = (f"{parameters.name[i]}\0{contents[i]}" for i in order)
    return blake2b("\n".join(rows).encode(), digest_size=8).hexdigest()
