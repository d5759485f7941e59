"""Who works on a run: an operating system lock, a file that names the holder, and its heartbeat."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffract_dask.errors import RunLockedError
from diffract_dask.runs import encoding
from diffract_dask.runs.records import RunRecord, now

__all__ = ["hold", "is_held", "observed"]

LEASE = "_lease.json"
_LOCK = ".lock"
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
    """Return a record as it is to be shown: what it says is running, and is not, was interrupted."""
    if record.path is None or is_held(record.path):
        return record
    shown = record.copy()
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
