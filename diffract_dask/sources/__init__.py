"""Sources: one function per kind of checkpoint, in one table. The only place that names a framework.

A source of your own is a function and its declaration; it may return a :class:`~diffract_dask.catalog.Checkpoint`
or simply a mapping of names to arrays:

>>> import numpy as np
>>> def read_csv(path):
...     return {"weight": np.loadtxt(path, delimiter=",", ndmin=2)}
>>> source = register(Source("csv", read_csv, suffixes=(".csv",), summary="one matrix as text"))
>>> del SOURCES["csv"]

Packages declare theirs as entry points of the group ``diffract_dask.sources``, each naming a :class:`Source`.
"""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from diffract_dask.errors import SourceError, UnsupportedSourceError, did_you_mean

if TYPE_CHECKING:
    from diffract_dask.catalog import Checkpoint

__all__ = ["ENTRY_POINTS", "SOURCES", "Source", "open_checkpoint", "register", "source_of"]

ENTRY_POINTS = "diffract_dask.sources"


@dataclass(frozen=True, slots=True)
class Source:
    """Declaration of one kind of checkpoint.

    Parameters
    ----------
    name : str
    open : callable
        ``open(model, **options)`` returns a Checkpoint, or a mapping of names to arrays.
    suffixes : tuple of str
        Ends of file names that it opens, in lower case; also of files in a folder, and of ``<suffix>.index.json``.
    accepts : callable, optional
        ``accepts(model) -> bool`` for objects and whatever else than `suffixes` tells.
    summary : str
        One line for people.
    """

    name: str
    open: Callable[..., Checkpoint | Mapping[str, Any]]
    suffixes: tuple[str, ...] = ()
    accepts: Callable[[Any], bool] | None = None
    summary: str = ""

    def takes(self, model: Any) -> bool:
        """Return whether this source opens `model` (an object, a path, or a list of paths)."""
        paths = _paths(model)
        if paths and self.suffixes:
            from diffract_dask.sources.shards import INDEX, shard_files

            if len(paths) == 1 and os.path.isdir(paths[0]):
                return bool(shard_files(paths[0], self.suffixes))
            ends = (*self.suffixes, *(suffix + INDEX for suffix in self.suffixes))
            return all(path.lower().endswith(ends) for path in paths)
        return self.accepts is not None and self.accepts(model)


def _lazily(module: str, function: str) -> Callable[..., Any]:
    """Return a function that is imported when it is called: sources build on the catalog, which needs this package."""

    def call(*args: Any, **options: Any) -> Any:
        return getattr(import_module(f"{__name__}.{module}"), function)(*args, **options)

    return call


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source(
            "arrays",
            _lazily("arrays", "open_arrays"),
            accepts=lambda model: isinstance(model, Mapping),
            summary="a mapping of names to NumPy arrays, array-likes or PyTorch tensors (a state dict)",
        ),
        Source(
            "npz",
            _lazily("npz", "open_npz"),
            suffixes=(".npz",),
            accepts=_lazily("npz", "is_open_npz"),
            summary="arrays that numpy.savez wrote; linkable if not compressed",
        ),
        Source(
            "trace",
            _lazily("traces", "open_trace"),
            accepts=_lazily("traces", "is_trace"),
            summary="a traced forward pass (TorchLens), which knows the parameters that are used",
        ),
        Source(
            "module", _lazily("torch", "open_module"), accepts=_lazily("torch", "is_module"), summary="torch.nn.Module"
        ),
        Source(
            "torch",
            _lazily("torch", "open_torch_file"),
            suffixes=(".pt", ".pth", ".pth.tar", ".bin", ".ckpt"),
            summary="what torch.save wrote, one file or sharded; read with weights_only",
        ),
        Source(
            "safetensors",
            _lazily("safetensors", "open_safetensors"),
            suffixes=(".safetensors",),
            summary="safetensors, one file or sharded, with or without index; linkable",
        ),
    )
}
"""All sources by name. The last that takes a model opens it, so that a source of your own goes before these."""


def register(source: Source, *, replace: bool = False) -> Source:
    """Add a source; it is asked before those that are there.

    Raises
    ------
    SourceError
        The name is taken and ``replace=True`` was not given.
    """
    if source.name in SOURCES and not replace:
        raise SourceError(f"a source {source.name!r} is there already; give register(..., replace=True)")
    SOURCES.pop(source.name, None)
    SOURCES[source.name] = source
    return source


@cache
def _load_entry_points() -> None:
    for point in entry_points(group=ENTRY_POINTS):
        try:
            source = point.load()
            if not isinstance(source, Source):
                raise TypeError(f"expected a Source, found a {type(source).__name__}")
        except Exception as error:  # one broken package must not take the others' sources away
            warnings.warn(f"the source {point.name!r} of {point.value!r} cannot be loaded: {error}", stacklevel=3)
            continue
        SOURCES.setdefault(source.name, source)


def open_checkpoint(model: Any, **options: Any) -> Checkpoint:
    """Open a model: an object, a path (file, sharded folder, index), or a list of shards. Nothing is read but headers.

    Parameters
    ----------
    model : object
        Whatever a source in :data:`SOURCES` takes; a Checkpoint is returned as it is.
    **options
        Passed to the source.

    Raises
    ------
    UnsupportedSourceError
        No source takes it.
    SourceError
        The path does not exist, or the source cannot read it.

    Examples
    --------
    >>> import numpy as np
    >>> checkpoint = open_checkpoint({"layer.weight": np.ones((3, 2))})
    >>> [(t.name, t.shape, t.dtype) for t in checkpoint.tensors]
    [('layer.weight', (3, 2), 'float64')]
    """
    from diffract_dask.catalog import Checkpoint
    from diffract_dask.sources.arrays import open_arrays

    if isinstance(model, Checkpoint):
        return model
    source = source_of(model)
    paths = _paths(model)
    if paths:
        model = paths[0] if isinstance(model, str | os.PathLike) else paths
    try:
        opened = source.open(model, **options)
    except OSError as error:
        raise SourceError(f"{', '.join(paths) or type(model).__qualname__} cannot be read: {error}") from error
    if isinstance(opened, Checkpoint):
        return opened
    if isinstance(opened, Mapping):
        return open_arrays(opened, source=", ".join(paths) or source.name)
    raise SourceError(
        f"the source {source.name!r} returned a {type(opened).__name__}; expected a Checkpoint or a mapping of names "
        "to arrays"
    )


def source_of(model: Any) -> Source:
    """Return the source that opens a model; nothing is read.

    Raises
    ------
    UnsupportedSourceError
        No source takes it.
    SourceError
        The path does not exist.
    """
    _load_entry_points()
    paths = _paths(model)
    if paths:
        _check_exist(paths)
        model = paths[0] if isinstance(model, str | os.PathLike) else paths
    source = _find(model, paths)
    if source is None:
        raise _unsupported(model, paths)
    return source


def _paths(model: Any) -> list[str]:
    """Return the path or paths that `model` is, with ``~`` expanded; nothing if it is an object."""
    if isinstance(model, str | os.PathLike):
        return [os.path.expanduser(os.fsdecode(model))]
    if isinstance(model, Sequence) and model and all(isinstance(x, str | os.PathLike) for x in model):
        return [os.path.expanduser(os.fsdecode(x)) for x in model]
    return []


def _check_exist(paths: Sequence[str]) -> None:
    for path in paths:
        if not os.path.exists(path):
            folder = os.path.dirname(os.path.abspath(path))
            near = did_you_mean(os.path.basename(path), os.listdir(folder)) if os.path.isdir(folder) else ""
            raise SourceError(f"{path!r} does not exist.{near}")


def _find(model: Any, paths: Sequence[str]) -> Source | None:
    for source in reversed(list(SOURCES.values())):
        if source.takes(model):
            return source
    if len(paths) == 1 and os.path.isfile(paths[0]):
        return SOURCES.get(_sniff(paths[0]))
    return None


def _sniff(path: str) -> str:
    """Return the name of the built-in source for a file whose name does not tell, by its first bytes."""
    with open(path, "rb") as file:
        start = file.read(9)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if any(name.endswith("data.pkl") for name in names):
            return "torch"
        return "npz" if any(name.endswith(".npy") for name in names) else ""
    if start[8:] == b"{":
        return "safetensors"
    return "torch" if start[:1] == b"\x80" else ""


def _unsupported(model: Any, paths: Sequence[str]) -> UnsupportedSourceError:
    suffixes = sorted({suffix for source in SOURCES.values() for suffix in source.suffixes})
    if paths:
        return UnsupportedSourceError(
            f"no source opens {', '.join(paths)!r}; known file names end in {', '.join(suffixes)}. "
            "Register your own source with diffract_dask.sources.register"
        )
    if hasattr(model, "shape") and hasattr(model, "dtype"):
        what = "a single array has no name; give a mapping {'name': array}"
    else:
        what = f"no source takes a {type(model).__module__}.{type(model).__qualname__}"
    known = "\n".join(f"  {source.name}: {source.summary}" for source in SOURCES.values())
    return UnsupportedSourceError(f"{what}. Sources:\n{known}\nRegister your own with diffract_dask.sources.register")
