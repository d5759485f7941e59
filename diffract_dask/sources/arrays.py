"""Mappings of names to arrays: NumPy (with ml_dtypes), anything array-like, and PyTorch tensors among them.

Also opens the wrappers that training scripts put around a state dict, and leaves the optimizer's state out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask.catalog import Checkpoint, SkipReason, Tensor
from diffract_dask.errors import SourceError
from diffract_dask.sources import dtypes

__all__ = ["Unwrapped", "array_tensor", "from_torch", "open_arrays", "raw_rows", "unwrap"]

WRAPPERS = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network", "params", "weights")
"""Keys under which checkpoints keep their weights, the first that is there wins."""

_NO_WEIGHTS = re.compile(r".*optim.*|opt(_.*)?|.*sched.*|.*scaler.*|.*rng.*|callbacks|loops|adam.*|sgd.*")
_AVERAGE = re.compile(r"(.*_)?(ema|swa)(_.*)?")
_LONGEST_TEXT = 1000


def open_arrays(model: Mapping[Any, Any], source: str = "") -> Checkpoint:
    """Open a mapping of names to arrays, with or without wrappers.

    Parameters
    ----------
    model : mapping
        Values may be NumPy arrays, array-likes (``__array__``) and PyTorch tensors, also mixed. Nested mappings are
        flattened, their keys joined by a dot. Entries that are no arrays get a row with a reason.
    source : str
        What to call it; by default its class.
    """
    found = unwrap(model)
    tensors = found.tensors()
    torch = any(from_torch(value) for value in found.entries.values())
    return Checkpoint(tensors, source or type(model).__qualname__, "torch" if torch else "numpy", found.attrs)


def from_torch(value: Any) -> bool:
    """Return whether `value` is an object of PyTorch, without importing it."""
    return any(cls.__module__.split(".", 1)[0] == "torch" for cls in type(value).__mro__)


# ------------------------------------------------------------------------------------------------------ wrappers


@dataclass(slots=True)
class Unwrapped:
    """What is inside a checkpoint: the entries by full name, and attributes (:class:`Checkpoint`).

    `moments` is what the names start with of entries that belong to an optimizer, empty if none does.
    """

    entries: dict[str, Any]
    moments: str = ""
    path: list[str] = field(default_factory=list)
    said: dict[str, str | int | float | bool] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def attrs(self) -> dict[str, Any]:
        """The attributes of the checkpoint; only what there is."""
        found = {"checkpoint": self.said, "wrapper": ".".join(self.path), "left_out": self.left_out}
        return {key: value for key, value in found.items() if value}

    def tensors(self) -> list[Tensor]:
        """Return the tensors of all entries."""
        made = []
        for name, value in self.entries.items():
            tensor = array_tensor(name, value)
            if self.moments and name.startswith(self.moments) and not tensor.skip:
                tensor = replace(tensor, skip=SkipReason.OPTIMIZER)
            made.append(tensor)
        return made


def unwrap(content: Mapping[Any, Any]) -> Unwrapped:
    """Return the weights inside a checkpoint.

    Notes
    -----
    1. While a key of :data:`WRAPPERS` leads to a mapping with arrays in it, go there. What lies beside it is left
       out, and listed, if it is the state of an optimizer or scheduler, an average (EMA), or has the same keys;
       other weights beside it (a discriminator, say) stop this step, so that nothing is dropped.
    2. Nested mappings and lists are flattened (``generator.conv1.weight``); state of an optimizer is left out.
    3. Numbers and texts beside mappings are attributes; in a flat mapping every entry is a parameter.
    4. What is itself the state of an optimizer (``state`` beside ``param_groups``) gives rows, but no weights.
    """
    found = Unwrapped({})
    while (key := _wrapper(content)) is not None:
        for other, value in content.items():
            if isinstance(value, str | int | float | bool) and len(str(value)) <= _LONGEST_TEXT:
                found.said[str(other)] = value
            elif other != key and _is_container(value):
                found.left_out.append(".".join([*found.path, str(other)]))
        found.path.append(key)
        content = _mapping(content[key])
    found.moments = "state." if _is_moments("state", content) else ""
    flat = not any(_is_container(value) for value in content.values())
    for name, value in _flatten(content, "", found.left_out):
        if flat or _is_array(value):
            if name in found.entries:
                raise SourceError(f"two entries of the checkpoint are named {name!r} when their keys are joined")
            found.entries[name] = value
        elif isinstance(value, str | int | float | bool) and len(str(value)) <= _LONGEST_TEXT:
            found.said[name] = value
    return found


def _wrapper(content: Mapping[Any, Any]) -> str | None:
    for key in WRAPPERS:
        if key not in content or not _is_container(content[key]) or isinstance(content[key], list | tuple):
            continue
        inside = _mapping(content[key])
        if not any(_is_array(value) or _is_container(value) for value in inside.values()):
            continue
        for other, value in content.items():
            if other == key or not _holds_weights(value) or _is_no_weights(str(other), value):
                continue
            if _is_moments(other, content):
                continue
            alike = isinstance(value, Mapping) and value.keys() == inside.keys()
            if not (alike or _AVERAGE.fullmatch(str(other).lower())):
                return None
        return key
    return None


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_container(value: Any) -> bool:
    """Return whether `value` is a mapping, a module, or a list with arrays or mappings in it."""
    if isinstance(value, list | tuple):
        return any(_is_array(x) or isinstance(x, Mapping) for x in value)
    return isinstance(value, Mapping) or (from_torch(value) and hasattr(value, "state_dict"))


def _mapping(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    inside: Mapping[Any, Any] = value.state_dict(keep_vars=True)
    return inside


def _holds_weights(value: Any) -> bool:
    if _is_container(value):
        return any(_holds_weights(x) for x in _mapping(value).values())
    return _is_array(value) and "float" in str(value.dtype) and len(value.shape) > 1


def _is_no_weights(key: str, value: Any) -> bool:
    state = isinstance(value, Mapping) and "param_groups" in value
    return state or (_is_container(value) and bool(_NO_WEIGHTS.fullmatch(key.lower())))


def _is_moments(key: Any, content: Mapping[Any, Any]) -> bool:
    """Return whether `key` is where an optimizer's state dict keeps moments and the like."""
    return key == "state" and key in content and "param_groups" in content


def _flatten(content: Mapping[Any, Any], prefix: str, left_out: list[str]) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        name = f"{prefix}{key}"
        if not _is_container(value):
            yield name, value
        elif _is_no_weights(str(key), value):
            left_out.append(name)
        else:
            yield from _flatten(_mapping(value), f"{name}.", left_out)


# ------------------------------------------------------------------------------------------------------- tensors


def array_tensor(name: str, value: Any) -> Tensor:
    """Return the tensor of one entry: an array of any kind, a number, or something that only gets a row."""
    if from_torch(value):
        from diffract_dask.sources.torch import torch_tensor

        return torch_tensor(name, value)
    if isinstance(value, np.ma.MaskedArray) or hasattr(value, "tocsr"):
        return Tensor(name, tuple(value.shape), str(value.dtype), partial(_refuse, name), skip=SkipReason.SPARSE)
    if isinstance(value, bool | int | float | complex):
        value = np.asarray(value)
    if not _is_array(value):
        kind = "string" if isinstance(value, str | bytes) else "object"
        return Tensor(name, (), kind, partial(_refuse, name), skip=SkipReason.NOT_NUMERIC)
    dtype = _numpy_dtype(value)
    shape = tuple(int(n) for n in value.shape)
    if dtype.kind == "f" and dtype.itemsize > 8:
        # No format keeps extended precision, and the numerics are float64.
        return Tensor(name, shape, "float64", partial(_narrowed_rows, value), storage=_memory(value))
    stored = dtypes.dtype_name(dtype)
    if not dtypes.has_carrier(stored):
        known = dtypes.is_complex(stored) or dtypes.is_packed(stored)
        skip = "" if known else SkipReason.NOT_NUMERIC
        return Tensor(name, shape, stored, partial(_refuse, name), skip=skip)
    return Tensor(name, shape, stored, partial(raw_rows, value), storage=_memory(value))


def _numpy_dtype(value: Any) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(value.dtype)
    except TypeError:  # of a framework that NumPy does not know
        dtype = np.asarray(value).dtype
    return dtype


def _memory(value: Any) -> tuple[Any, ...]:
    """Return what is equal for arrays that share all their memory; array-likes are known by identity only."""
    if not isinstance(value, np.ndarray) or not value.size:
        return ("object", id(value))
    return (value.__array_interface__["data"][0], value.shape, value.strides, value.dtype.str, value.dtype.name)


def raw_rows(value: Any, start: int, stop: int) -> NDArray[Any]:
    """Return rows [start, stop) of an array as a raw array (little-endian, C order, codes as integers).

    The result aliases `value` where nothing is to be converted.
    """
    rows = np.asarray(value[start:stop] if len(value.shape) else value, order="C")
    stored = dtypes.dtype_name(rows.dtype)
    carrier = dtypes.carrier(stored)
    if dtypes.decoded(stored) != carrier:
        return rows.view(carrier)
    return rows.astype(carrier, copy=False)


def _narrowed_rows(value: Any, start: int, stop: int) -> NDArray[np.float64]:
    return np.asarray(value[start:stop] if len(value.shape) else value, dtype="<f8", order="C")


def _refuse(name: str, start: int, stop: int) -> NDArray[Any]:
    raise SourceError(f"rows {start} to {stop} of {name!r} cannot be read: it is no dense array of numbers")
