"""safetensors, one file or sharded, read by byte range and without any other package.

The format is eight bytes with the length of a JSON header, the header, and the tensors; see
https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from diffract_dask.catalog import Checkpoint, Location, SkipReason, Tensor, natural_key
from diffract_dask.errors import CorruptFileError, SourceError
from diffract_dask.sources import dtypes
from diffract_dask.sources.linked import fingerprint, read_rows
from diffract_dask.sources.shards import merge, resolve

__all__ = ["SUFFIXES", "open_safetensors"]

SUFFIXES = (".safetensors",)

_DTYPES: MappingProxyType[str, str] = MappingProxyType(
    {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
        "C64": "complex64",
        "F4": "float4_e2m1fn",
        "F6_E2M3": "float6_e2m3fn",
        "F6_E3M2": "float6_e3m2fn",
    }
)
_FRAMEWORKS = MappingProxyType({"pt": "torch", "np": "numpy", "tf": "tensorflow", "flax": "flax", "mlx": "mlx"})
_PREFIX = 8


def open_safetensors(model: str | Path | Sequence[str | Path]) -> Checkpoint:
    """Open a ``.safetensors`` file, a sharded folder, an index (``.safetensors.index.json``) or a list of files.

    Only headers are read. Parameters are in natural order of their names, however they are spread over files.

    Raises
    ------
    CorruptFileError
        A file is cut off, has bytes appended, or contradicts its header; a shard or an indexed tensor is missing.
    """
    shards = resolve(model, SUFFIXES)
    content: dict[str, list[Tensor]] = {}
    metadata: dict[str, str] = {}
    for path in shards.files:
        content[path], found = _read_file(path)
        metadata.update(found)
    tensors = sorted(merge(shards, content), key=lambda tensor: natural_key(tensor.name))
    attrs: dict[str, Any] = {"checkpoint": metadata} if metadata else {}
    return Checkpoint(tensors, shards.source, _FRAMEWORKS.get(metadata.get("format", ""), ""), attrs)


def _read_file(path: str) -> tuple[list[Tensor], dict[str, str]]:
    """Return the tensors of one file and its metadata, after every check that the header allows."""
    with open(path, "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        prefix = file.read(_PREFIX)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < _PREFIX or found.st_size < _PREFIX + length:
            _refuse_header(path, prefix, length, found.st_size)
        content = prefix + _read_exactly(file, length)
    header = _parse(path, content[_PREFIX:])
    metadata = header.pop("__metadata__", None) or {}
    base = len(content)
    mark = fingerprint(0, content)
    spans: list[tuple[int, int, str]] = []
    tensors: list[Tensor] = []
    for name, entry in header.items():
        dtype, shape, start, stop = _entry(path, name, entry)
        spans.append((start, stop, name))
        place = Location(path, base + start, stop - start, found.st_size, found.st_mtime_ns, mark)
        tensors.append(_tensor(name, dtype, shape, place))
    _check_layout(path, spans, base, found.st_size)
    return _mark_shared(tensors, spans), {str(k): str(v) for k, v in metadata.items()}


def _read_exactly(file: Any, length: int) -> bytes:
    parts: list[bytes] = []
    while length > 0 and (part := file.read(length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _refuse_header(path: str, prefix: bytes, length: int, size: int) -> NoReturn:
    if prefix == b"version ":
        raise CorruptFileError(f"{path!r} is a Git LFS pointer, not the file itself; fetch it with 'git lfs pull'")
    expected = f"at least {_PREFIX + length} bytes for its header" if len(prefix) == _PREFIX else f"at least {_PREFIX}"
    raise CorruptFileError(f"{path!r} is cut off or is not safetensors: expected {expected}, found {size} bytes")


def _parse(path: str, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in made if keys.count(key) > 1)
            raise CorruptFileError(f"{path!r}: the header has {twice!r} twice")
        return made

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except ValueError as error:
        raise CorruptFileError(f"{path!r} is not safetensors: its header is not JSON ({error})") from error
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__") or {}, dict):
        raise CorruptFileError(f"{path!r} is not safetensors: its header is not a mapping of tensor names")
    return header


def _entry(path: str, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Return (dtype name, shape, start, stop) of one tensor; `start` and `stop` count from the end of the header."""
    try:
        code, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sound = all(isinstance(x, int) and x >= 0 for x in (*shape, start, stop)) and start <= stop
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise CorruptFileError(f"{path!r}: the header's entry for {name!r} is not dtype, shape and data_offsets")
    dtype = _DTYPES.get(code, str(code).lower())
    expected = math.prod(shape) * dtypes.itemsize(dtype)
    if dtypes.has_carrier(dtype) and stop - start != expected:
        raise CorruptFileError(
            f"{path!r}: {name!r} of shape {list(shape)} and type {code} needs {expected} bytes, found "
            f"{stop - start} in the header"
        )
    return dtype, shape, start, stop


def _tensor(name: str, dtype: str, shape: tuple[int, ...], place: Location) -> Tensor:
    if dtypes.has_carrier(dtype):
        return Tensor(name, shape, dtype, partial(read_rows, place, shape, dtype), place)
    skip = SkipReason.QUANTISED if dtypes.is_packed(dtype) else SkipReason.NOT_NUMERIC
    return Tensor(name, shape, dtype, partial(_no_raw_form, place.path, name, dtype), skip=skip)


def _no_raw_form(path: str, name: str, dtype: str, start: int, stop: int) -> NDArray[np.uint8]:
    raise SourceError(f"{path!r}: rows {start} to {stop} of {name!r} cannot be read, its type is {dtype}")


def _check_layout(path: str, spans: Sequence[tuple[int, int, str]], base: int, size: int) -> None:
    """Refuse gaps, overlaps (but for tensors that share all their bytes) and any other size than the header's."""
    end = 0
    last: tuple[int, int] = (0, 0)
    for start, stop, name in sorted(spans):
        if (start, stop) == last:
            continue
        if start != end:
            raise CorruptFileError(
                f"{path!r}: {name!r} lies at bytes {start} to {stop} of the data, expected from {end} on: the header "
                "leaves a gap or overlaps"
            )
        end, last = stop, (start, stop)
    if base + end != size:
        state = "is cut off" if size < base + end else "has bytes appended"
        raise CorruptFileError(
            f"{path!r} {state}: expected {base + end} bytes ({base} of header and {end} of tensors), found {size}. "
            "Fetch it again"
        )


def _mark_shared(tensors: list[Tensor], spans: Sequence[tuple[int, int, str]]) -> list[Tensor]:
    """Tell of tensors that share all their bytes; safetensors forbids it, but some writers do."""
    count: dict[tuple[int, int], int] = {}
    for start, stop, _ in spans:
        count[start, stop] = count.get((start, stop), 0) + 1
    if all(n == 1 for (start, stop), n in count.items() if start < stop):
        return tensors
    return [
        Tensor(t.name, t.shape, t.dtype, t.read, t.location, storage=(t.location.path, start, stop, t.shape, t.dtype))
        if t.location and count[start, stop] > 1 and start < stop
        else t
        for t, (start, stop, _) in zip(tensors, spans, strict=True)
    ]
