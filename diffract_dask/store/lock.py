"""One writer at a time: the write lock, the count of writes, and what killed writers left behind.

``generation/`` is a Zarr array of one number, so that no reader of Zarr groups looks for members in it. The number
is even between writes and odd within one. Beside its chunk lie the lock file and ``.staging/``.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import numpy as np
from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from diffract_dask.errors import ReadOnlyStoreError, StoreLockedError
from diffract_dask.store.arrays import ArraySpec, dumps, loads
from diffract_dask.store.objects import PARTIAL, Objects

__all__ = ["GENERATION", "STAGING", "Generation", "WriteLock", "first_count", "new_staging", "sweep"]

GENERATION = "generation"
STAGING = f"{GENERATION}/.staging"
_LOCK = f"{GENERATION}/.lock"
_HOLDER = f"{GENERATION}/.holder.json"
_HOLDER_BYTES = 512
_POLL = 0.02
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
_FOREIGN_STAGING_SECONDS = 7 * 86400
_SPEC = ArraySpec((), (), "uint64", (), attrs={"long_name": "Number of the last write; odd while one goes on"})


def first_count() -> int:
    """Return an even number to count writes from, larger than that of anything that had the same name before."""
    return time.time_ns() // 1000 * 2


class Generation:
    """The count of writes to a store."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def create(self) -> int:
        """Write the array, and return its first count."""
        count = first_count()
        self._objects.set_many({f"{GENERATION}/zarr.json": dumps(_SPEC.document())})
        self.write(count)
        return count

    def read(self) -> int:
        """Return the count."""
        data = self._objects.get(f"{GENERATION}/{_SPEC.key(())}")
        return int.from_bytes(data, "little") if data else 0

    def write(self, count: int) -> None:
        """Replace the count."""
        self._objects.overwrite(f"{GENERATION}/{_SPEC.key(())}", np.uint64(count).tobytes())


class WriteLock:
    """The lock that every write takes; re-entrant, and shared by the threads of one process.

    Local stores take an operating system lock, which ends with the process; a soft lock where the file system
    has none. Object stores have a lock object, which is a courtesy only: they offer nothing that excludes.
    """

    def __init__(self, objects: Objects, location: str | None) -> None:
        self._objects = objects
        self._location = location
        self._thread = threading.RLock()
        self._depth = 0
        self._file: BaseFileLock | None = None
        self._token = ""
        if objects.root is not None:
            self._file = FileLock(f"{objects.root}/{_LOCK}", thread_local=False, poll_interval=_POLL)

    @property
    def held(self) -> bool:
        """Whether this process holds the lock."""
        return self._depth > 0

    @contextmanager
    def hold(self, timeout: float) -> Iterator[bool]:
        """Hold the lock; yields whether this is the outermost hold.

        Raises
        ------
        StoreLockedError
            It was not free within `timeout` seconds.
        ReadOnlyStoreError
            The folder cannot be written.
        """
        if not self._thread.acquire(timeout=max(timeout, 0)):
            raise self._locked(timeout)
        try:
            outermost = self._depth == 0
            if outermost:
                self._acquire(timeout)
            self._depth += 1
            try:
                if outermost:
                    self._sign()
                yield outermost
            finally:
                self._depth -= 1
                if outermost:
                    self._release()
        finally:
            self._thread.release()

    def _acquire(self, timeout: float) -> None:
        if self._file is not None:
            try:
                self._acquire_file(self._file, timeout)
            except Timeout:
                raise self._locked(timeout) from None
            except OSError as error:
                if error.errno not in _NOT_WRITABLE:
                    raise
                raise ReadOnlyStoreError(
                    f"the store {self._location!r} cannot be written ({error.strerror}); open it with mode='r'"
                ) from error
        elif not self._objects.in_memory:
            self._acquire_object(timeout)

    def _sign(self) -> None:
        """Say who holds the lock, for those who wait."""
        if self._file is not None:
            self._objects.overwrite(_HOLDER, dumps(_myself()).ljust(_HOLDER_BYTES))

    def _acquire_file(self, file: BaseFileLock, timeout: float) -> None:
        try:
            file.acquire(timeout=timeout)
        except (NotImplementedError, OSError) as error:
            hopeless = isinstance(error, OSError) and error.errno in _NOT_WRITABLE
            if hopeless or isinstance(error, Timeout) or isinstance(file, SoftFileLock):
                raise
            self._file = SoftFileLock(f"{file.lock_file}.soft", thread_local=False, poll_interval=_POLL)
            self._acquire_file(self._file, timeout)

    def _acquire_object(self, timeout: float) -> None:
        """Leave a lock object with a token of our own, and look whether it stayed."""
        self._token = uuid4().hex
        mine = dumps({**_myself(), "token": self._token})
        deadline = time.monotonic() + timeout
        while True:
            holder = loads(self._objects.get(_HOLDER))
            if not holder or _is_dead(holder):
                self._objects.set(_HOLDER, mine)
                if loads(self._objects.get(_HOLDER)).get("token") == self._token:
                    return
            if time.monotonic() > deadline:
                raise self._locked(timeout)
            time.sleep(_POLL)

    def _release(self) -> None:
        if self._file is not None:
            self._file.release()
        elif not self._objects.in_memory:
            self._objects.delete(_HOLDER)

    def _locked(self, timeout: float) -> StoreLockedError:
        try:
            holder = loads(self._objects.get(_HOLDER))
        except json.JSONDecodeError:
            holder = {}
        who = "another thread of this process" if self._objects.in_memory else "another process"
        if holder:
            who = f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('time')}"
        hint = "" if self._file is not None or self._objects.in_memory else f"; if it is gone, remove {_HOLDER!r} there"
        return StoreLockedError(
            f"the store {self._location or 'in memory'!r} is being written by {who}, and was not free within "
            f"{timeout:g} s; wait, or raise the setting lock-timeout{hint}"
        )


def _myself() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "time": datetime.now(UTC).isoformat(timespec="seconds")}


def _is_dead(holder: dict[str, Any]) -> bool:
    """Return whether a record names a process of this host that is gone."""
    if holder.get("host") != socket.gethostname() or os.name == "nt":  # there, signal 0 would interrupt the process
        return False
    try:
        os.kill(int(holder.get("pid", 0)), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        return False
    return False


def new_staging() -> str:
    """Return a folder to write in before a rename; its name tells whose it is."""
    return f"{STAGING}/{uuid4().hex}-{os.getpid()}-{socket.gethostname()}"


def sweep(objects: Objects, *, crashed: bool) -> None:
    """Remove what writers left that are gone: staging folders; after a crash within a write, half-written files too.

    Called with the lock held. Staging folders of live processes are theirs still: models are written before the
    lock is taken.
    """
    if objects.root is None:
        return
    for name in objects.list_dir(STAGING):
        _, pid, host = [*name.split("-", 2), "", ""][:3]
        if host != socket.gethostname():
            path = f"{objects.root}/{STAGING}/{name}"
            gone = time.time() - os.stat(path).st_mtime > _FOREIGN_STAGING_SECONDS
        else:
            gone = _is_dead({"host": host, "pid": pid})
        if gone:
            objects.delete_dir(f"{STAGING}/{name}")
    if crashed:
        for folder, folders, files in os.walk(objects.root):
            if folder == objects.root:
                folders[:] = [name for name in folders if name != GENERATION]
            for name in files:
                if name.endswith(PARTIAL):
                    os.unlink(f"{folder}/{name}")
