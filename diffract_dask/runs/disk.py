"""What the runs take on disk, removing some of them, and merging two roots."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from diffract_dask.errors import RunLockedError
from diffract_dask.runs import encoding, leases, manifests, naming, outputs, snapshots
from diffract_dask.runs.listing import RunRegistry
from diffract_dask.runs.naming import check_known, names
from diffract_dask.runs.records import RunRecord, read_record, refuse_newer

__all__ = ["DiskUsage", "Pruned", "RunSize", "disk_usage", "merge", "prune"]


@dataclass(frozen=True)
class RunSize:
    """What a run takes: `size` bytes in all its files, `own` of them in files that no other run shares."""

    run: str
    pipeline: str
    variant: str
    size: int
    own: int
    files: int


@dataclass(frozen=True)
class DiskUsage:
    """What a root takes.

    Attributes
    ----------
    total : int
        In bytes; files that several runs share count once, what links lead to does not count.
    snapshots : int
        Of it, the sources.
    pipelines : dict
        Bytes by pipeline; a shared file counts for the first of its runs.
    """

    total: int
    snapshots: int
    pipelines: dict[str, int]
    runs: list[RunSize]


def disk_usage(registry: RunRegistry) -> DiskUsage:
    """Return what the runs take, the largest first; links are not followed and shared files are counted once."""
    seen: set[tuple[int, int]] = set()
    runs: list[RunSize] = []
    pipelines: dict[str, int] = {}
    total = 0
    for record in sorted(registry.list_runs(), key=lambda record: record.started or ""):
        size, own, first, files = _size(str(record.path), seen)
        runs.append(RunSize(record.where, record.pipeline, record.variant, size, own, files))
        pipelines[record.pipeline] = pipelines.get(record.pipeline, 0) + first
        total += first
    kept = sum(_size(str(registry.root / name), seen)[2] for name in (snapshots.SCRIPTS, manifests.MANIFESTS))
    runs.sort(key=lambda item: item.size, reverse=True)
    return DiskUsage(total + kept, kept, pipelines, runs)


def _size(folder: str, seen: set[tuple[int, int]]) -> tuple[int, int, int, int]:
    """Return bytes in all files, in unshared ones, and in those not seen before; and the number of files."""
    size = own = first = files = 0
    pending = [folder]
    while pending:
        try:
            entries = list(os.scandir(pending.pop()))
        except OSError:
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
                continue
            try:
                stat = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            files += 1
            size += stat.st_size
            own += stat.st_size if stat.st_nlink == 1 else 0
            if stat.st_nlink == 1 or (stat.st_dev, stat.st_ino) not in seen:
                first += stat.st_size
                seen.add((stat.st_dev, stat.st_ino))
    return size, own, first, files


STATUSES = ("pending", "running", "done", "failed", "interrupted", "partial")


@dataclass(frozen=True)
class Pruned:
    """A run that `prune` removes, or would remove; `kept` says why it was left."""

    run: str
    reason: str
    size: int
    removed: bool
    kept: str | None = None


def prune(
    registry: RunRegistry,
    *,
    status: str | Iterable[str] = ("failed", "interrupted"),
    pipeline: str | None = None,
    variant: str | None = None,
    older_than_days: float | None = None,
    keep_last: int | None = None,
    dry_run: bool = True,
) -> list[Pruned]:
    """Return the runs that are to go, and remove them unless it is a dry run.

    Parameters
    ----------
    registry : RunRegistry
    status : str or iterable of str
        Runs of this status are to go.
    pipeline, variant : str, optional
        Look at no others.
    older_than_days : float, optional
        Only those that started longer ago.
    keep_last : int, optional
        Of each variant, all done runs but the newest so many are to go too.
    dry_run : bool

    Notes
    -----
    A run that another process works on stays, and so does one that a run which stays was computed from, or
    whose files its links lead to.
    """
    wanted = set(names(status, "status"))
    check_known(wanted, STATUSES, "status", "a run")
    every = registry.list_runs()
    among = [
        record
        for record in every
        if (pipeline is None or record.pipeline == pipeline) and (variant is None or record.variant == variant)
    ]
    reasons = {record.where: f"it is {record.status}" for record in among if record.status in wanted}
    if keep_last is not None:
        reasons |= _surplus(among, keep_last)
    if older_than_days is not None:
        old = {record.where for record in among if _age_days(record) > older_than_days}
        reasons = {where: reason for where, reason in reasons.items() if where in old}
    needed = _needed([record for record in every if record.where not in reasons], every)
    answer = []
    for record in among:
        if record.where not in reasons or record.path is None:
            continue
        kept = f"{needed[record.where]} was computed from it" if record.where in needed else None
        if kept is None and leases.is_held(record.path):
            kept = f"{leases.holder(record.path)} works on it"
        size = _size(str(record.path), set())[1]
        if kept is None and not dry_run:
            kept = _removed(registry, record)
        done = kept is None and not dry_run
        answer.append(Pruned(record.where, reasons[record.where], size, done, kept))
    return answer


def _surplus(among: list[RunRecord], keep: int) -> dict[str, str]:
    counts: dict[tuple[str, str], int] = {}
    found = {}
    for record in among:  # the newest first
        if record.status == "done":
            at = (record.pipeline, record.variant)
            counts[at] = counts.get(at, 0) + 1
            if counts[at] > keep:
                found[record.where] = f"{keep} newer runs of its variant are kept"
    return found


def _age_days(record: RunRecord) -> float:
    try:
        return (time.time() - datetime.fromisoformat(record.started or "").timestamp()) / 86400
    except ValueError:
        return 0.0


def _linked(record: RunRecord) -> list[str]:
    """Return the runs, by folder, that links among the outputs of a run lead into."""
    found = []
    for stage in record.stages:
        path = Path(record.fdir, "stages", naming.folder(stage))
        for name, said in outputs.read_meta(path).get("links", {}).items():
            end = Path(os.path.normpath((path / outputs.OUTPUTS / name).parent / said))
            if record.root is not None and end.is_relative_to(record.root):
                found.append("/".join(end.relative_to(record.root).parts[:3]))
    return [where for where in found if where != record.where]


def _needed(staying: list[RunRecord], every: list[RunRecord]) -> dict[str, str]:
    """Return the runs that others were computed from, by folder, with one that needs each."""
    table = {record.where: record for record in every}
    found: dict[str, str] = {}
    pending = list(staying)
    while pending:
        record = pending.pop()
        for where in (*record.upstream_runs.values(), *_linked(record)):
            if where not in found:
                found[where] = record.where
                pending += [table[where]] if where in table else []
    return found


def _removed(registry: RunRegistry, record: RunRecord) -> str | None:
    """Remove a run, with its lock held; return why not."""
    path = Path(str(record.path))
    try:
        with leases.hold(path, 0.0):
            (path / "run.json").unlink(missing_ok=True)  # first: what is half removed is no run any more
            for child in path.iterdir():
                if child.name not in (leases.LEASE, leases.LOCK):
                    shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
    except RunLockedError as error:
        return str(error)
    shutil.rmtree(path, ignore_errors=True)
    for above in (path.parent, path.parent.parent):
        if above != registry.root and not any(above.iterdir()):
            above.rmdir()
    return None


@dataclass(frozen=True)
class Merged:
    """What `merge` brought: folders of new runs, and of runs that both roots had."""

    added: list[str]
    both: list[str]


def merge(registry: RunRegistry, other: str | os.PathLike[str]) -> Merged:
    """Bring the runs, manifests and snapshots of another root into this one; nothing here is lost.

    Of a run that both have, the one that got further stays, with the memberships and invocations of both.
    """
    source = RunRegistry(other)
    added, both = [], []
    for record in source.list_runs():
        target = registry.run_path(record.pipeline, record.variant, record.fingerprint)
        present = read_record(target, registry.root)
        if present is None:
            _copied(Path(str(record.path)), target)
            added.append(record.where)
            continue
        refuse_newer(present)
        both.append(record.where)
        with leases.hold(target, registry.wait):
            _joined(Path(str(record.path)), target, present, record)
    snapshots.fetch(registry.root, source.root)
    for path in (source.root / manifests.MANIFESTS).glob("*.json"):
        mine = registry.root / manifests.MANIFESTS / path.name
        theirs = encoding.read_json(path, {})
        if str(theirs.get("written")) > str(encoding.read_json(mine, {}).get("written", "")):
            mine.parent.mkdir(parents=True, exist_ok=True)
            encoding.write_json(mine, theirs)
    registry.invalidate()
    return Merged(added, both)


def _copied(source: Path, target: Path) -> None:
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, partial, symlinks=True, ignore=shutil.ignore_patterns(leases.LEASE, leases.LOCK))
    if target.exists():  # a folder without a run
        shutil.rmtree(target)
    os.replace(partial, target)


def _joined(source: Path, target: Path, present: RunRecord, record: RunRecord) -> None:
    memberships = [*present.memberships, *(at for at in record.memberships if at not in present.memberships)]
    if present.status != "done" and record.status == "done":
        shutil.rmtree(target / "stages", ignore_errors=True)
        shutil.copytree(source / "stages", target / "stages", symlinks=True)
        present, record = record.copy(), present
    present.memberships = memberships
    for path in (source / "invocations").glob("*.json"):
        mine = target / "invocations" / path.name
        if not mine.exists():
            mine.parent.mkdir(exist_ok=True)
            shutil.copy2(path, mine)
    encoding.write_json(target / "run.json", present.as_dict())
