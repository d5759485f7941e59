"""The kinds of artifacts, in one table: how each is recognised and read. Previews and differences follow from that.

A kind of your own is a reader and its declaration; the reader yields a :class:`~diffract_dask.runs.readers.Content`:

>>> from contextlib import contextmanager
>>> from diffract_dask.runs.readers import Content
>>> @contextmanager
... def read_lines(path):
...     yield Content(document=path.read_text().split())
>>> kind = register_kind(ArtifactKind("words", "one word a line", read_lines, "document", (".words",)))
>>> del KINDS["words"]

Packages declare theirs as entry points of the group ``diffract_dask.artifacts``, each naming an :class:`ArtifactKind`.
"""

from __future__ import annotations

import json
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffract_dask.errors import ArtifactError, ArtifactNotFoundError, DiffractError, did_you_mean

if TYPE_CHECKING:
    from diffract_dask.runs.readers import Content

__all__ = ["ENTRY_POINTS", "KINDS", "VIEWS", "ArtifactKind", "is_unit", "kind_of", "reading", "register_kind"]

ENTRY_POINTS = "diffract_dask.artifacts"

VIEWS = {
    "array": "one array",
    "arrays": "arrays by address",
    "table": "columns of one length",
    "image": "pixels, by frame",
    "document": "nested mappings, lists and values",
    "text": "lines",
    "weights": "parameters of models, with the metrics that are stored of them",
    "bytes": "nothing that is known",
}
"""What artifacts are read as; each has one form of preview and one of difference."""

Reader = Callable[[Path], "AbstractContextManager[Content]"]


@dataclass(frozen=True, slots=True)
class ArtifactKind:
    """Declaration of one kind of artifact.

    Parameters
    ----------
    name : str
    summary : str
        One line for people.
    open : callable
        ``open(path)`` is a context manager that yields a Content.
    view : str
        One of :data:`VIEWS`.
    suffixes : tuple of str
        Ends of names, in lower case.
    accepts : callable, optional
        ``accepts(path) -> bool`` for what the name does not tell; of folders it alone decides.
    extra : str
        The extra of the package that installs what it needs.
    """

    name: str
    summary: str
    open: Reader
    view: str
    suffixes: tuple[str, ...] = ()
    accepts: Callable[[Path], bool] | None = None
    extra: str = ""


def _lazily(module: str, function: str) -> Reader:
    """Return a reader that is imported when it is called."""

    def call(path: Path) -> AbstractContextManager[Content]:
        made: AbstractContextManager[Content] = getattr(import_module(f"diffract_dask.runs.{module}"), function)(path)
        return made

    return call


def _zarr_attributes(path: Path) -> Any:
    try:
        return json.loads((path / "zarr.json").read_bytes()).get("attributes", {})
    except (OSError, ValueError, AttributeError):
        return None


def _is_zarr(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in ("zarr.json", ".zgroup", ".zarray"))


def _is_weight_store(path: Path) -> bool:
    attributes = _zarr_attributes(path) if path.is_dir() else None
    return isinstance(attributes, dict) and str(attributes.get("created_by", "")).startswith("diffract_dask")


def _is_shards(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*.safetensors.index.json"))


def _starts(*marks: bytes) -> Callable[[Path], bool]:
    def test(path: Path) -> bool:
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            start = file.read(16)
        return any(start.startswith(mark) for mark in marks)

    return test


def _is_text(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        start = file.read(4096)
    try:
        start.decode("utf8")
    except UnicodeDecodeError as error:
        if error.start < len(start) - 4 or len(start) < 4096:  # not a character that the end cuts in two
            return False
    return b"\0" not in start


_IMAGES = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".tif", ".tiff")
_TEXTS = (".txt", ".log", ".md", ".py", ".toml", ".ini", ".cfg", ".html", ".xml", ".svg", ".rst", ".sh", ".dat", ".tex")

KINDS: dict[str, ArtifactKind] = {
    kind.name: kind
    for kind in (
        ArtifactKind("binary", "any other file", _lazily("readers", "read_binary"), "bytes", accepts=Path.is_file),
        ArtifactKind("text", "text in UTF-8", _lazily("readers", "read_text"), "text", _TEXTS, _is_text),
        ArtifactKind(
            "image",
            "an image that Pillow reads",
            _lazily("readers", "read_image"),
            "image",
            _IMAGES,
            _starts(b"\x89PNG", b"\xff\xd8\xff", b"GIF8"),
            "images",
        ),
        ArtifactKind("csv", "comma-separated values", _lazily("readers", "read_csv"), "table", (".csv", ".tsv")),
        ArtifactKind("json", "JSON", _lazily("readers", "read_json"), "document", (".json",)),
        ArtifactKind("yaml", "YAML", _lazily("readers", "read_yaml"), "document", (".yaml", ".yml")),
        ArtifactKind(
            "npy", "one NumPy array", _lazily("readers", "read_npy"), "array", (".npy",), _starts(b"\x93NUMPY")
        ),
        ArtifactKind("npz", "NumPy arrays by name", _lazily("readers", "read_npz"), "arrays", (".npz",)),
        ArtifactKind(
            "parquet",
            "a table in Apache Parquet",
            _lazily("readers_scientific", "read_parquet"),
            "table",
            (".parquet", ".pq"),
            _starts(b"PAR1"),
            "parquet",
        ),
        ArtifactKind(
            "hdf5",
            "HDF5",
            _lazily("readers_scientific", "read_hdf5"),
            "arrays",
            (".h5", ".hdf5", ".hdf", ".ptyd", ".cxi", ".nxs"),
            _starts(b"\x89HDF\r\n\x1a\n"),
            "hdf5",
        ),
        ArtifactKind(
            "netcdf",
            "netCDF, classic or version 4",
            _lazily("readers_scientific", "read_netcdf"),
            "arrays",
            (".nc", ".nc4", ".cdf", ".netcdf"),
            _starts(b"CDF\x01", b"CDF\x02", b"CDF\x05"),
        ),
        ArtifactKind(
            "zarr",
            "Zarr, version 2 or 3, a folder or zipped",
            _lazily("readers_scientific", "read_zarr"),
            "arrays",
            (".zarr.zip",),
            _is_zarr,
        ),
        ArtifactKind(
            "torch",
            "a checkpoint that torch.save wrote",
            _lazily("weights", "read_checkpoint"),
            "weights",
            (".pt", ".pth", ".ckpt"),
            extra="torch",
        ),
        ArtifactKind(
            "safetensors",
            "a checkpoint in safetensors, one file or a folder of shards",
            _lazily("weights", "read_checkpoint"),
            "weights",
            (".safetensors",),
            _is_shards,
        ),
        ArtifactKind(
            "weight store",
            "a store of models and their metrics (diffract_dask.Session)",
            _lazily("weights", "read_weight_store"),
            "weights",
            accepts=_is_weight_store,
        ),
    )
}
"""All kinds by name. The last that takes a path reads it, so that a kind of your own goes before these."""


def register_kind(kind: ArtifactKind, *, replace: bool = False) -> ArtifactKind:
    """Add a kind; it is asked before those that are there.

    Raises
    ------
    ArtifactError
        The name is taken and ``replace=True`` was not given, or there is no such view.
    """
    if kind.view not in VIEWS:
        raise ArtifactError(f"the kind {kind.name!r} has the view {kind.view!r}; there are {', '.join(VIEWS)}")
    if kind.name in KINDS and not replace:
        raise ArtifactError(f"a kind {kind.name!r} is there already; give register_kind(..., replace=True)")
    KINDS.pop(kind.name, None)
    KINDS[kind.name] = kind
    return kind


@cache
def _load_entry_points() -> None:
    for point in entry_points(group=ENTRY_POINTS):
        try:
            kind = point.load()
            if not isinstance(kind, ArtifactKind):
                raise TypeError(f"expected an ArtifactKind, found a {type(kind).__name__}")
        except Exception as error:  # one broken package must not take the others' kinds away
            warnings.warn(f"the kind {point.name!r} of {point.value!r} cannot be loaded: {error}", stacklevel=3)
            continue
        if kind.name not in KINDS:
            register_kind(kind)


def kind_of(path: Path, name: str | None = None) -> ArtifactKind:
    """Return the kind of a file or folder: as named, else by the end of its name, else by its first bytes.

    Raises
    ------
    ArtifactError
        There is no kind of this name, or no kind takes the folder.
    ArtifactNotFoundError
        Nothing is there.
    """
    _load_entry_points()
    if name is not None:
        if name not in KINDS:
            raise ArtifactError(f"no kind of artifact is called {name!r}.{did_you_mean(name, KINDS)}")
        return KINDS[name]
    if not path.exists():
        raise ArtifactNotFoundError(f"{path.name} is not there, or is a link to nothing")
    found = _recognised(path)
    if found is None:
        raise ArtifactError(f"{path.name} is a folder of no kind that is known; name a file in it")
    return found


def _recognised(path: Path) -> ArtifactKind | None:
    kinds = list(reversed(KINDS.values()))
    if path.is_file():
        name = path.name.lower()
        fitting = [(len(end), -i, kind) for i, kind in enumerate(kinds) for end in kind.suffixes if name.endswith(end)]
        if fitting:
            return max(fitting, key=lambda one: one[:2])[2]
    return next((kind for kind in kinds if kind.accepts is not None and kind.accepts(path)), None)


_DAMAGED = (EOFError, struct.error, zipfile.BadZipFile, zlib.error)
_UNREADABLE = (OSError, ValueError, RuntimeError, LookupError, ArithmeticError, *_DAMAGED)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn what packages raise on a file that is damaged into an ArtifactError that names it."""
    try:
        yield
    except DiffractError:
        raise
    except _UNREADABLE as error:
        raise ArtifactError(f"{what} cannot be read: {error}") from error


def is_unit(path: Path) -> bool:
    """Return whether a folder is one artifact, and not several."""
    _load_entry_points()
    return path.is_dir() and _recognised(path) is not None
