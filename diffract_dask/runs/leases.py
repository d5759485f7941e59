"""Who works on a run: an operating system lock, a file that names the holder, and its heartbeat."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from diffract_dask.errors import RunError, RunLockedError
from diffract_dask.runs import encoding
from diffract_dask.runs.records import RunRecord, now

__all__ = ["hold", "is_held", "observed"]

LEASE = "_lease.json"
LOCK = ".lock"
_BEAT_SECONDS = 5.0
_DEAD_SECONDS = 60.0


def myself() -> dict[str, Any]:
    """Return what tells this process from every other: host, pid, when it started, its space of process ids."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "born": _born(pid), "space": _space()}


def _born(pid: int) -> str | None:
    """Return when a process started, where the system says so: a number is used again after a while."""
    try:
        with open(f"/proc/{pid}/stat", encoding="latin1") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _space() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def is_held(path: Path) -> bool:
    """Return whether the holder that a run's folder names is alive.

    On this host its process id tells; elsewhere, whether its heartbeat is younger than a minute.
    """
    lease = encoding.read_json(path / LEASE)
    if not isinstance(lease, dict):
        return False
    me = myself()
    if (lease.get("host"), lease.get("space")) == (me["host"], me["space"]) and os.name != "nt":
        pid = lease.get("pid")
        if not isinstance(pid, int) or (lease.get("born") is not None and _born(pid) != lease["born"]):
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True
        return True
    try:
        return time.time() - os.stat(path / LEASE).st_mtime < _DEAD_SECONDS
    except OSError:
        return False


def observed(record: RunRecord) -> RunRecord:
    """Return a record that has not ended as it is to be shown: what nobody works on any more was interrupted."""
    if record.path is None or is_held(record.path):
        return record
    shown = record.copy()
    shown.gone = True
    shown.stage_status = {
        stage: "interrupted" if status == "running" else status for stage, status in record.stage_status.items()
    }
    return shown


def holder(path: Path) -> str:
    """Return who holds a run, in words."""
    lease = encoding.read_json(path / LEASE)
    if not isinstance(lease, dict):
        return "another process"
    return f"process {lease.get('pid')} on {lease.get('host')} (since {lease.get('since')})"


_held: dict[str, int] = {}  # runs that threads of this process work on
_log = logging.getLogger("diffract_dask.runs")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in words that a folder cannot be written.

    Raises
    ------
    RunError
        It cannot.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise
        raise RunError(f"the folder {path} cannot be written ({error.strerror}); give another root") from error


@contextmanager
def hold(path: Path, wait: float | None) -> Iterator[None]:
    """Hold a run, which no other process or thread then works on; its lease says who, and its heartbeat that it lives.

    Raises
    ------
    RunLockedError
        Another one holds it and did not end within `wait` seconds; the message names it.
    RunError
        The folder cannot be written.
    """
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        lock = _acquire(path, wait)
    stop = threading.Event()
    try:
        lease = path / LEASE
        _held[str(path)] = threading.get_ident()
        encoding.write_json(lease, {**myself(), "since": now()})
        beat = threading.Thread(target=_beat, args=(lease, stop), daemon=True, name="diffract_dask.runs heartbeat")
        beat.start()
        try:
            yield
        finally:
            stop.set()
            beat.join()
            with contextlib.suppress(OSError):
                os.unlink(lease)
    finally:
        _held.pop(str(path), None)
        lock.release()


def _acquire(path: Path, wait: float | None) -> BaseFileLock:
    if _held.get(str(path)) == threading.get_ident():
        raise RunLockedError(f"the run in {path} is at work in this very thread; a stage cannot run its own run again")
    lock: BaseFileLock = FileLock(path / LOCK, thread_local=False)
    deadline = None if wait is None else time.monotonic() + wait
    told = False
    while True:
        left = 1.0 if deadline is None else max(0.0, min(1.0, deadline - time.monotonic()))
        try:
            lock.acquire(timeout=left, poll_interval=0.02)
            return lock
        except Timeout:
            if deadline is not None and time.monotonic() >= deadline:
                raise RunLockedError(
                    f"the run in {path} is at work in {holder(path)} and did not end within {wait:g} s; wait for it, "
                    "stop it, or raise RunRegistry(wait=…)"
                ) from None
            if not told:
                _log.warning("waiting for %s, which works on %s", holder(path), path)
                told = True
        except (NotImplementedError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
            lock = SoftFileLock(path / f"{LOCK}.soft", thread_local=False)  # the file system has no locks


def _beat(lease: Path, stop: threading.Event) -> None:
    while not stop.wait(_BEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(lease)
