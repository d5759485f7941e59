"""``.npz``: arrays in a zip file. Uncompressed members are read by byte range and can be linked."""

from __future__ import annotations

import ast
import math
import os
import struct
import zipfile
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffract_dask.catalog import Checkpoint, Location, SkipReason, Tensor
from diffract_dask.errors import CorruptFileError, SourceError
from diffract_dask.sources import dtypes
from diffract_dask.sources.arrays import raw_rows
from diffract_dask.sources.linked import fingerprint, read_rows
from diffract_dask.sources.zipped import opened_zip

__all__ = ["SUFFIXES", "is_open_npz", "open_npz"]

SUFFIXES = (".npz",)

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_MAGIC = b"\x93NUMPY"


class _Header(NamedTuple):
    """The header of a ``.npy`` file: how long it is, and what it says."""

    length: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool


def is_open_npz(model: Any) -> bool:
    """Return whether `model` is what ``numpy.load`` returns for a ``.npz`` file that has a path."""
    return isinstance(model, np.lib.npyio.NpzFile) and bool(getattr(model.zip, "filename", None))


def open_npz(path: str | Path | np.lib.npyio.NpzFile) -> Checkpoint:
    """Open a ``.npz`` file; only the zip directory and the headers of its members are read.

    Pickled members are never unpickled: they get a row with the reason ``not_numeric``.

    Raises
    ------
    CorruptFileError
        The file is cut off, has bytes appended, or is no zip of ``.npy`` files.
    """
    if isinstance(path, np.lib.npyio.NpzFile):
        path = str(getattr(path.zip, "filename", ""))
    path = os.path.abspath(path)
    found = os.stat(path)
    with opened_zip(path) as archive, open(path, "rb") as file:
        mark = fingerprint(archive.start, archive.directory)
        load = lru_cache(maxsize=1)(partial(_load, path))
        tensors = [_member(path, archive.zip, file, info, found, mark, load) for info in archive.zip.infolist()]
    return Checkpoint(tensors, path, "numpy")


def _member(
    path: str,
    archive: zipfile.ZipFile,
    file: BinaryIO,
    info: zipfile.ZipInfo,
    found: os.stat_result,
    mark: str,
    load: Callable[[str], NDArray[Any]],
) -> Tensor:
    name = info.filename.removesuffix(".npy")
    with archive.open(info) as member:
        header = _npy_header(member)
    if header is None:
        return Tensor(name, (), "object", partial(_refuse, path, name), skip=SkipReason.NOT_NUMERIC)
    dtype = dtypes.dtype_name(header.dtype)
    nbytes = math.prod(header.shape) * header.dtype.itemsize
    if dtype != "object" and info.file_size - header.length != nbytes:
        raise CorruptFileError(
            f"{path!r}: {name!r} of shape {list(header.shape)} and type {dtype} needs {nbytes} bytes, found "
            f"{info.file_size - header.length}"
        )
    if not dtypes.has_carrier(dtype):
        skip = "" if dtypes.is_complex(dtype) else SkipReason.NOT_NUMERIC
        return Tensor(name, header.shape, dtype, partial(_refuse, path, name), skip=skip)
    in_order = not header.fortran or sum(n > 1 for n in header.shape) < 2
    if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 0x1:
        offset = _data_offset(path, file, info) + header.length
        if in_order and header.dtype.newbyteorder("<") == header.dtype:
            place = Location(path, offset, nbytes, found.st_size, found.st_mtime_ns, mark)
            return Tensor(name, header.shape, dtype, partial(read_rows, place, header.shape, dtype), place)
    return Tensor(name, header.shape, dtype, partial(_rows, load, info.filename))


def _data_offset(path: str, file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Return where a stored member starts; the local header may differ in length from the directory's entry."""
    file.seek(info.header_offset)
    content = file.read(_LOCAL_HEADER.size)
    if len(content) < _LOCAL_HEADER.size or content[:4] != b"PK\3\4":
        raise CorruptFileError(f"{path!r}: no member {info.filename!r} at byte {info.header_offset}")
    *_, name_length, extra_length = _LOCAL_HEADER.unpack(content)
    return info.header_offset + _LOCAL_HEADER.size + int(name_length) + int(extra_length)


def _npy_header(member: Any) -> _Header | None:
    """Return the header of a ``.npy`` member, None if it is something else."""
    start = member.read(len(_MAGIC) + 2)
    if len(start) < len(_MAGIC) + 2 or not start.startswith(_MAGIC):
        return None
    width = 2 if start[-2] == 1 else 4
    length = int.from_bytes(member.read(width), "little")
    try:
        content = ast.literal_eval(member.read(length).decode("utf8" if start[-2] >= 3 else "latin1").strip())
        dtype = np.lib.format.descr_to_dtype(content["descr"])
        shape = tuple(int(n) for n in content["shape"])
        return _Header(len(start) + width + length, dtype, shape, bool(content["fortran_order"]))
    except (ValueError, SyntaxError, KeyError, TypeError):
        return None


def _load(path: str, filename: str) -> NDArray[Any]:
    """Return a whole member: compressed and column-major arrays cannot be read by rows."""
    with zipfile.ZipFile(path) as archive, archive.open(filename) as member:
        loaded: NDArray[Any] = np.lib.format.read_array(member, allow_pickle=False)
        return loaded


def _rows(load: Callable[[str], NDArray[Any]], filename: str, start: int, stop: int) -> NDArray[Any]:
    return raw_rows(load(filename), start, stop)


def _refuse(path: str, name: str, start: int, stop: int) -> NDArray[Any]:
    raise SourceError(f"{path!r}: rows {start} to {stop} of {name!r} cannot be read, it is no array of numbers")
