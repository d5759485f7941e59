"""Zip files, in which ``.npz`` and PyTorch keep arrays: opened only if they are whole."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from diffract_dask.errors import CorruptFileError

__all__ = ["Archive", "is_zip", "opened_zip"]

_START = b"PK\3\4"
_END_OF_DIRECTORY = b"PK\5\6"
_END_BYTES = 22


class Archive(NamedTuple):
    """An open zip file, the bytes of its directory, and where that starts."""

    zip: zipfile.ZipFile
    start: int
    directory: bytes


def is_zip(path: str) -> bool:
    """Return whether a file starts as a zip file does; one that is cut off still does."""
    with Path(path).open("rb") as file:
        return file.read(len(_START)) == _START


@contextmanager
def opened_zip(path: str) -> Iterator[Archive]:
    """Open a zip file that starts with its first member and ends with its directory.

    Raises
    ------
    CorruptFileError
        The file is cut off or has bytes appended.
    """
    size = os.path.getsize(path)
    try:
        with zipfile.ZipFile(path) as archive:
            with open(path, "rb") as file:
                file.seek(archive.start_dir)
                directory = file.read()
            end = directory.rfind(_END_OF_DIRECTORY)
            expected = archive.start_dir + end + _END_BYTES + len(archive.comment)
            if end < 0 or expected != size:
                raise CorruptFileError(f"{path!r} has bytes appended: expected {expected} bytes, found {size}")
            first = min((info.header_offset for info in archive.infolist()), default=archive.start_dir)
            if first:
                raise CorruptFileError(
                    f"{path!r} ({size} bytes) has bytes appended or put before: its directory covers only what follows "
                    f"byte {first}"
                )
            yield Archive(archive, archive.start_dir, directory)
    except zipfile.BadZipFile as error:
        raise CorruptFileError(
            f"{path!r} ({size} bytes) is cut off or is not a zip file: expected the directory at its end, found {size} "
            "bytes without one"
        ) from error
