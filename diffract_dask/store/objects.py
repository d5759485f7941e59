"""The objects of a Zarr store by key, read and written at once; local files go past Zarr's event loop."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

import numpy as np
from zarr.abc.store import RangeByteRequest
from zarr.abc.store import Store as ZarrStore
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore

from diffract_dask.errors import StoreError

__all__ = ["PARTIAL", "Objects"]

PARTIAL = ".partial"
"""Suffix of a file that is being written; left behind by a process that was killed."""

_CONCURRENT = 64
_MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class Objects:
    """Whole objects of one Zarr store.

    Parameters
    ----------
    store : zarr.abc.store.Store
        A LocalStore is accessed as files (20–100 µs an object, against 300 µs through Zarr); of others, many
        objects go through one call.

    Notes
    -----
    An object is replaced in one step: local files are written beside their place and renamed. Pickles by the
    folder or by the store; what lives in this process's memory cannot travel.
    """

    def __init__(self, store: ZarrStore) -> None:
        self.store = store
        self.root = os.path.abspath(store.root) if isinstance(store, LocalStore) else None
        self._direct = isinstance(store, MemoryStore) and hasattr(store, "get_sync")

    @property
    def in_memory(self) -> bool:
        """Whether the objects exist in this process only."""
        path_system = getattr(getattr(self.store, "fs", None), "sync_fs", getattr(self.store, "fs", None))
        return isinstance(self.store, MemoryStore) or getattr(path_system, "protocol", "") == "memory"

    def __reduce__(self) -> tuple[Any, ...]:
        if self.in_memory:
            raise StoreError(
                "a store in memory cannot be sent to another process; send the data itself with slices.inline(), or "
                "use a store in a directory"
            )
        return Objects, (self.store if self.root is None else LocalStore(self.root, read_only=True),)

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}" if key else str(self.root)

    # -------------------------------------------------------------------------------------------------- reading

    def get(self, key: str) -> bytes | None:
        """Return an object, None if there is none."""
        if self.root is None:
            return self.get_many([key])[0]
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                return file.read()
        except _MISSING:
            return None

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return several objects, one after the other (local) or at once."""
        if self.root is not None:
            return [self.get(key) for key in keys]
        if self._direct:
            return [_bytes(self.store.get_sync(key)) for key in keys]  # type: ignore[attr-defined]
        prototype = default_buffer_prototype()
        found = sync(_gather([self.store.get(key, prototype) for key in keys]))
        return [_bytes(buffer) for buffer in found]

    def require(self, key: str) -> bytes:
        """Return an object that must be there; StoreError if it is not."""
        data = self.get(key)
        if data is None:
            raise StoreError(f"the object {key!r} of the store was removed or never written")
        return data

    def in_place(self, key: str) -> memoryview | None:
        """Return the bytes of an object where they lie in this process's memory, read-only; None if they do not."""
        buffer = self.store.get_sync(key) if self._direct else None  # type: ignore[attr-defined]
        return None if buffer is None else memoryview(buffer.as_numpy_array()).cast("B").toreadonly()

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes of an object from `offset` on; StoreError if they are not there."""
        held = self.in_place(key)
        if held is not None:
            part = held[offset : offset + len(out)]
            found = len(part)
            if found == len(out):
                out[:] = part
        elif self.root is None:
            wanted = RangeByteRequest(offset, offset + len(out))
            buffer = sync(self.store.get(key, default_buffer_prototype(), wanted))
            found = 0 if buffer is None else len(buffer)
            if buffer is not None and found == len(out):
                out[:] = buffer.to_bytes()
        else:
            found = self._fill(key, offset, out)
        if found != len(out):
            raise StoreError(
                f"the object {key!r} of the store is damaged or was removed: {len(out)} bytes are wanted from byte "
                f"{offset} on, {found} are there"
            )

    def _fill(self, key: str, offset: int, out: memoryview) -> int:
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                file.seek(offset)
                done = 0
                while done < len(out):
                    got = file.readinto(out[done:])
                    if not got:
                        break
                    done += got
                return done
        except _MISSING:
            return 0

    def exists(self, key: str) -> bool:
        """Return whether there is an object of this key."""
        if self.root is not None:
            return os.path.isfile(self._path(key))
        return sync(self.store.exists(key))

    def list_dir(self, prefix: str) -> list[str]:
        """Return the names directly below a prefix, sorted."""
        if self.root is None:
            return sorted({name.rstrip("/").rpartition("/")[2] for name in sync(_names(self.store, prefix))})
        try:
            return sorted(os.listdir(self._path(prefix)))
        except _MISSING:
            return []

    # -------------------------------------------------------------------------------------------------- writing

    def set(self, key: str, data: bytes | memoryview, *, fresh: bool = False) -> None:
        """Write or replace an object in one step; `fresh`: nobody can see it yet, so it need not be one step."""
        if self.root is None:
            self.set_many({key: data})
            return
        path = self._path(key)
        folder, _, name = path.rpartition("/")
        target = path if fresh else f"{folder}/{name}.{uuid4().hex}{PARTIAL}"
        try:
            file = os.open(target, _WRITE, 0o666)
        except FileNotFoundError:
            os.makedirs(folder, exist_ok=True)
            file = os.open(target, _WRITE, 0o666)
        try:
            try:
                view = memoryview(data).cast("B")
                while len(view):
                    view = view[os.write(file, view) :]
            finally:
                os.close(file)
            if not fresh:
                os.replace(target, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(target)
            raise

    def overwrite(self, key: str, data: bytes) -> None:
        """Replace an object by one of the same, small size.

        Local files are written in place: replacing a file gives its block back, which takes a millisecond on a
        file system that discards blocks at once. Readers see the old or the new content if it is one word.
        """
        if self.root is None:
            self.set_many({key: data})
            return
        try:
            file = os.open(self._path(key), _WRITE & ~os.O_TRUNC & ~os.O_CREAT)
        except FileNotFoundError:
            self.set(key, data)
            return
        try:
            os.write(file, data)
        finally:
            os.close(file)

    def set_many(self, objects: Mapping[str, bytes | memoryview | None], *, fresh: bool = False) -> None:
        """Write several objects; those that are None are deleted."""
        if self.root is not None:
            for key, data in objects.items():
                if data is None:
                    self.delete(key)
                else:
                    self.set(key, data, fresh=fresh)
            return
        if self._direct:
            for key, data in objects.items():
                if data is None:
                    self.store.delete_sync(key)  # type: ignore[attr-defined]
                else:
                    self.store.set_sync(key, _buffer(data))  # type: ignore[attr-defined]
            return
        sync(
            _gather(
                self.store.delete(key) if data is None else self.store.set(key, _buffer(data))
                for key, data in objects.items()
            )
        )

    def publish(self, prefix: str, objects: Mapping[str, bytes | memoryview], staging: str) -> None:
        """Make a new group or array with all of its objects visible in one step.

        Parameters
        ----------
        prefix : str
            Where it goes; keys of `objects` are below it.
        staging : str
            Folder to write in before the rename; where nothing can be renamed, ``zarr.json`` comes last instead.
        """
        if self.root is not None:
            self.set_many({f"{staging}/{key}": data for key, data in objects.items()}, fresh=True)
            self.move(staging, prefix)
            return
        last = objects["zarr.json"]
        self.set_many({f"{prefix}/{key}": data for key, data in objects.items() if key != "zarr.json"})
        self.set_many({f"{prefix}/zarr.json": last})

    def move(self, source: str, target: str) -> None:
        """Rename a local folder; its new parent is made if need be."""
        os.makedirs(self._path(target).rpartition("/")[0], exist_ok=True)
        os.rename(self._path(source), self._path(target))

    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""
        if self.root is None:
            self.set_many({key: None})
            return
        with suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self._path(key))

    def delete_dir(self, prefix: str) -> None:
        """Remove everything below a prefix."""
        if self.root is None:
            sync(self.store.delete_dir(prefix))
        else:
            shutil.rmtree(self._path(prefix), ignore_errors=True)


_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def _bytes(buffer: Buffer | None) -> bytes | None:
    return None if buffer is None else buffer.to_bytes()


def _buffer(data: bytes | memoryview) -> Buffer:
    # A copy, unless it is bytes: the objects of a MemoryStore must not alias an array of the caller.
    return default_buffer_prototype().buffer.from_array_like(np.frombuffer(bytes(data), np.uint8))


async def _gather(calls: Iterable[Any]) -> list[Any]:
    limit = asyncio.Semaphore(_CONCURRENT)

    async def one(call: Any) -> Any:
        async with limit:
            return await call

    return await asyncio.gather(*(one(call) for call in calls))


async def _names(store: ZarrStore, prefix: str) -> list[str]:
    try:
        return [name async for name in store.list_dir(prefix)]
    except FileNotFoundError:
        return []
