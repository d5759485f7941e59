"""Readers of plain files: each opens a path and yields its :class:`Content`, of which nothing large is read yet."""

from __future__ import annotations

import ast
import csv
import json
import math
import os
import zipfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
from numpy.typing import NDArray

from diffract_dask.errors import ArtifactError, MissingExtraError
from diffract_dask.runs.arrays import BLOCK_ENTRIES, ArrayRef, Selection

__all__ = [
    "DOCUMENT_BYTES",
    "TABLE_BYTES",
    "TEXT_BYTES",
    "Content",
    "file_array",
    "missing_extra",
    "read_binary",
    "read_csv",
    "read_image",
    "read_json",
    "read_npy",
    "read_npz",
    "read_text",
    "read_yaml",
]

TEXT_BYTES = 4 * 2**20
"""Of a longer text only the beginning is read."""

DOCUMENT_BYTES = 16 * 2**20
"""A longer JSON or YAML file is taken as text."""

TABLE_BYTES = 32 * 2**20
"""Of a longer CSV file only the beginning is read."""

_PIXELS = 32 * 10**6
_FRAMES = 1000
_PROBED = 1000
_MAGIC = b"\x93NUMPY"
_NOTHING: Any = object()


@dataclass(slots=True)
class Content:
    """What is in an artifact: arrays, or a document, or a text.

    Parameters
    ----------
    arrays : list of ArrayRef
        Not read yet.
    document : object
        What a JSON or YAML file says.
    text : str, optional
    attrs : dict
        What the file says of itself; JSON values.
    notes : list of str
        For people: what was left out, and why.
    models : dict
        Of a weight store: the attributes of each model, by id.
    metrics : callable, optional
        Of a weight store: ``metrics(model_id)`` returns ``{field: {parameter: value}}``; values of the model as a
        whole have the parameter ``""``.
    """

    arrays: list[ArrayRef] = field(default_factory=list)
    document: Any = _NOTHING
    text: str | None = None
    attrs: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    metrics: Callable[[str], dict[str, dict[str, float]]] | None = None

    @property
    def has_document(self) -> bool:
        """Whether the file was read as a document."""
        return self.document is not _NOTHING


def missing_extra(path: Path, package: str, extra: str) -> MissingExtraError:
    """Return the error for a format whose package is not installed."""
    return MissingExtraError(
        f"{path.name} needs the package {package}, which is not installed: pip install 'diffract_dask[{extra}]'"
    )


# ------------------------------------------------------------------------------------------------- NumPy


@dataclass(frozen=True, slots=True)
class _Header:
    """The header of a ``.npy`` file: how long it is, and what it says."""

    length: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool

    @classmethod
    def read(cls, file: Any, name: str) -> _Header:
        """Read it; ArtifactError if it is none."""
        start = file.read(len(_MAGIC) + 2)
        if len(start) < len(_MAGIC) + 2 or not start.startswith(_MAGIC):
            raise ArtifactError(f"{name} is not a .npy file: it does not begin with the NumPy mark")
        width = 2 if start[-2] == 1 else 4
        length = int.from_bytes(file.read(width), "little")
        try:
            said = ast.literal_eval(file.read(length).decode("utf8" if start[-2] >= 3 else "latin1").strip())
            dtype = np.lib.format.descr_to_dtype(said["descr"])
            shape = tuple(int(n) for n in said["shape"])
            return cls(len(start) + width + length, dtype, shape, bool(said["fortran_order"]))
        except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError) as error:
            raise ArtifactError(f"{name}: the header of the .npy file cannot be read: {error}") from error


def file_array(
    file: BinaryIO, name: str, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], *, fortran: bool = False
) -> ArrayRef:
    """Return an array whose entries lie in `file` from `offset` on, in C or Fortran order."""

    def in_c_order(shape: tuple[int, ...], selection: Selection) -> NDArray[Any]:
        out = np.empty([s.stop - s.start for s in selection], dtype)
        if not out.size:
            return out
        view = out.reshape(-1).view(np.uint8).data
        whole = len(shape)
        while whole and (selection[whole - 1].start, selection[whole - 1].stop) == (0, shape[whole - 1]):
            whole -= 1
        lead = max(0, whole - 1)  # up to here one position at a time, from here on in one go
        strides = [math.prod(shape[i + 1 :]) * dtype.itemsize for i in range(len(shape))]
        run = math.prod(out.shape[lead:]) * dtype.itemsize
        first = sum(s.start * stride for s, stride in zip(selection, strides, strict=True))
        for i, index in enumerate(np.ndindex(*out.shape[:lead])):
            place = offset + first + sum(j * stride for j, stride in zip(index, strides, strict=False))
            _fill(file, view[i * run : (i + 1) * run], place, name)
        return out

    def read(selection: Selection) -> NDArray[Any]:
        return in_c_order(shape[::-1], selection[::-1]).T if fortran else in_c_order(shape, selection)

    chunks = (
        (min(shape[0], BLOCK_ENTRIES), *[1] * (len(shape) - 1)) if fortran and len(shape) > 1 and shape[0] else None
    )
    return ArrayRef(name, shape, dtype, read, chunks)


def _fill(file: BinaryIO, view: memoryview, offset: int, name: str) -> None:
    file.seek(offset)
    done = 0
    while done < len(view):
        got = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not got:
            raise ArtifactError(f"{name or 'the file'} is cut off: it ends {len(view) - done} bytes too early")
        done += got


def _refused(name: str, shape: tuple[int, ...], dtype: np.dtype[Any], why: str) -> ArrayRef:
    def refuse(selection: Selection) -> NDArray[Any]:
        raise ArtifactError(f"{name or 'the array'} cannot be read: {why}")

    return ArrayRef(name, shape, dtype, refuse, refusal=why)


_PICKLED = "it holds Python objects, which are pickles, and those are not opened: they may run code"


@contextmanager
def read_npy(path: Path) -> Iterator[Content]:
    """Open a ``.npy`` file."""
    with open(path, "rb", buffering=0) as file:
        header = _Header.read(file, path.name)
        if header.dtype.hasobject:
            yield Content([_refused("", header.shape, header.dtype, _PICKLED)])
            return
        needed = header.length + math.prod(header.shape) * header.dtype.itemsize
        if os.fstat(file.fileno()).st_size < needed:
            raise ArtifactError(
                f"{path.name} is cut off: expected {needed} bytes, found {os.fstat(file.fileno()).st_size}"
            )
        yield Content([file_array(file, "", header.length, header.dtype, header.shape, fortran=header.fortran)])


@contextmanager
def read_npz(path: Path) -> Iterator[Content]:
    """Open a ``.npz`` file; members are decompressed from their beginning as far as is asked for."""
    with ExitStack() as stack:
        try:
            archive = stack.enter_context(zipfile.ZipFile(path))
        except zipfile.BadZipFile as error:
            raise ArtifactError(f"{path.name} is no .npz file, or cut off: {error}") from error
        arrays, notes = [], []
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            member: Any = stack.enter_context(archive.open(info))
            try:
                header = _Header.read(member, info.filename)
            except ArtifactError as error:
                notes.append(str(error))
                continue
            if header.dtype.hasobject:
                arrays.append(_refused(name, header.shape, header.dtype, _PICKLED))
            else:
                arrays.append(
                    file_array(member, name, header.length, header.dtype, header.shape, fortran=header.fortran)
                )
        yield Content(arrays, notes=notes)


# ------------------------------------------------------------------------------------------------- texts and documents


def _beginning(path: Path, limit: int) -> tuple[bytes, list[str]]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        data = file.read(limit)
    return data, [f"the first {limit} of {size} bytes"] if size > limit else []


def _decoded(data: bytes) -> str:
    return data.decode("utf-8-sig", "backslashreplace")


@contextmanager
def read_text(path: Path) -> Iterator[Content]:
    """Read a text, up to 4 MiB of it."""
    data, notes = _beginning(path, TEXT_BYTES)
    yield Content(text=_decoded(data), notes=notes)


@contextmanager
def _as_text(path: Path, why: str) -> Iterator[Content]:
    with read_text(path) as content:
        content.notes.insert(0, f"shown as text: {why}")
        yield content


@contextmanager
def read_json(path: Path) -> Iterator[Content]:
    """Read a JSON file; as a text where it is larger than 16 MiB or malformed."""
    if path.stat().st_size > DOCUMENT_BYTES:
        with _as_text(path, f"it has more than {DOCUMENT_BYTES} bytes") as content:
            yield content
        return
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        with _as_text(path, f"it is not JSON: {error}") as content:
            yield content
        return
    yield Content(document=document)


@contextmanager
def read_yaml(path: Path) -> Iterator[Content]:
    """Read a YAML file without making objects; several documents become a list."""
    import yaml

    if path.stat().st_size > DOCUMENT_BYTES // 4:
        with _as_text(path, f"it has more than {DOCUMENT_BYTES // 4} bytes") as content:
            yield content
        return
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        documents = list(yaml.load_all(path.read_bytes(), loader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())
        with _as_text(path, f"it is not YAML that can be read safely: {why}") as content:
            yield content
        return
    yield Content(document=documents[0] if len(documents) == 1 else documents)


@contextmanager
def read_csv(path: Path) -> Iterator[Content]:
    """Read a table, up to 32 MiB of it; columns of numbers as float64 (empty cells NaN), all others as text."""
    try:
        names = _distinct(next(_csv_rows(path), []))
        columns, ragged = _csv_columns(path, len(names))
    except csv.Error as error:
        raise ArtifactError(f"{path.name} is not a table of comma-separated values: {error}") from error
    size = path.stat().st_size
    notes = [f"the first {TABLE_BYTES} of {size} bytes"] if size > TABLE_BYTES else []
    if ragged:
        notes.append(f"{ragged} rows have more or fewer than {len(names)} cells")
    yield Content([_column(name, column) for name, column in zip(names, columns, strict=True)], notes=notes)


def _csv_columns(path: Path, n: int) -> tuple[list[array[float] | list[str]], int]:
    """Return the columns and how many rows are longer or shorter.

    A column is taken for numbers until a cell is none; then everything is read again with that column as text.
    """
    texts: set[int] = set()
    while True:
        before = len(texts)
        columns: list[Any] = [[] if i in texts else array("d") for i in range(n)]
        shared: dict[str, str] = {}  # one text that comes often is kept once
        ragged = 0
        for count, row in enumerate(islice(_csv_rows(path), 1, None)):
            if len(row) != n:
                ragged += 1
                row = [*row[:n], *[""] * (n - len(row))]
            for i, cell in enumerate(row):
                if i in texts:
                    columns[i].append(shared.setdefault(cell, cell))
                    continue
                try:
                    columns[i].append(float(cell))
                except ValueError:
                    columns[i].append(math.nan)
                    if cell.strip():
                        texts.add(i)
                        columns[i] = []
            if count == _PROBED and len(texts) > before:
                break
        if len(texts) == before:
            return columns, ragged


def _csv_rows(path: Path) -> Iterator[list[str]]:
    """Yield the rows that are not empty, that of the names first, without reading far ahead."""
    with open(path, encoding="utf-8-sig", errors="backslashreplace", newline="") as file:
        first = file.readline(TABLE_BYTES)
        file.seek(0)
        separator = "\t" if path.suffix.lower() == ".tsv" else max(",;", key=first.count)
        rows = csv.reader(_limited(file), delimiter=separator)
        yield from (row for row in rows if row)


def _limited(file: TextIO) -> Iterator[str]:
    left = TABLE_BYTES
    while line := file.readline(TABLE_BYTES):
        left -= len(line)
        if left < 0:
            return
        yield line


def _distinct(names: Sequence[str]) -> list[str]:
    """Return names of columns without repetition.

    >>> _distinct(["a", "", "a"])
    ['a', 'column 2', 'a (3)']
    """
    found: list[str] = []
    for i, name in enumerate(names, 1):
        name = name.strip() or f"column {i}"
        found.append(name if name not in found else f"{name} ({i})")
    return found


def _column(name: str, cells: array[float] | list[str]) -> ArrayRef:
    values: NDArray[Any] = np.array(cells, object if isinstance(cells, list) else float)
    return ArrayRef(name, values.shape, values.dtype, lambda s: values[s], stored="text" * isinstance(cells, list))


# ------------------------------------------------------------------------------------------------- images and the rest


@contextmanager
def read_image(path: Path) -> Iterator[Content]:
    """Open an image; each frame is an array (height, width) or (height, width, channel)."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise missing_extra(path, "pillow", "images") from None
    try:
        image = Image.open(path)
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError) as error:
        raise ArtifactError(f"{path.name} cannot be read as an image: {error}") from error
    with image:
        width, height = image.size
        if width * height > _PIXELS:
            raise ArtifactError(f"{path.name} has {width} x {height} pixels; at most {_PIXELS} are read")
        frames = int(getattr(image, "n_frames", 1))
        attrs = {"width": width, "height": height, "mode": image.mode, "format": image.format, "frames": frames}
        arrays = [_frame(image, i, path.name, f"frame {i}" if frames > 1 else "") for i in range(min(frames, _FRAMES))]
        notes = [f"the first {_FRAMES} of {frames} frames"] if frames > _FRAMES else []
        yield Content(arrays, attrs=attrs, notes=notes)


_MODES = {
    "P": "RGBA",
    "PA": "RGBA",
    "1": "L",
    "CMYK": "RGB",
    "YCbCr": "RGB",
    "LAB": "RGB",
    "HSV": "RGB",
    "La": "LA",
    "RGBa": "RGBA",
}


def _frame(image: Any, number: int, name: str, address: str) -> ArrayRef:
    mode = _MODES.get(image.mode, image.mode)
    bands = {"RGB": 3, "RGBA": 4, "RGBX": 4, "LA": 2}.get(mode, 0)
    dtype = np.dtype({"F": "f4", "I": "i4"}.get(mode, "u2" if mode.startswith("I;16") else "u1"))
    width, height = image.size
    shape = (height, width, bands) if bands else (height, width)
    decoded: list[NDArray[Any]] = []

    def read(selection: Selection) -> NDArray[Any]:
        if not decoded:
            try:
                image.seek(number)
                pixels = np.asarray(image.convert(mode) if image.mode != mode else image)
            except (OSError, SyntaxError, ValueError, EOFError) as error:
                raise ArtifactError(f"{name}: frame {number} cannot be decoded: {error}") from error
            decoded.append(pixels)
        return decoded[0][selection]

    return ArrayRef(address, shape, dtype, read)


@contextmanager
def read_binary(path: Path) -> Iterator[Content]:
    """Open any file as bytes."""
    size = path.stat().st_size
    with open(path, "rb", buffering=0) as file:
        yield Content([file_array(file, "", 0, np.dtype("u1"), (size,))])
