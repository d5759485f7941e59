"""The files that a stage puts out: their digests, whether they are still what was recorded, and taking them over."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diffract_dask.errors import ArtifactError
from diffract_dask.runs import encoding
from diffract_dask.runs.records import OutputFile

__all__ = ["clear", "content", "listed", "read_meta", "recorded", "settle", "take_over", "unchanged"]

OUTPUTS = "outputs"
METRICS = "metrics.json"
META = "_meta.json"
KEY = "_key"


def walk(folder: Path) -> Iterator[tuple[str, Path, bool]]:
    """Yield ``(path below, path, reached through a link)`` for every file below a folder; links in a circle end."""
    pending: list[tuple[str, str, bool, tuple[str, ...]]] = [(str(folder), "", False, ())]
    while pending:
        at, below, linked, above = pending.pop()
        real = os.path.realpath(at)
        if real in above:
            continue
        try:
            entries = sorted(os.scandir(at), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            name = f"{below}/{entry.name}" if below else entry.name
            link = linked or entry.is_symlink()
            if entry.is_dir():
                pending.append((entry.path, name, link, (*above, real)))
            else:
                yield name, Path(entry.path), link


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def recorded(stage: Path) -> dict[str, dict[str, Any]]:
    """Return what is to be recorded of a stage's outputs: size, time and digest by path."""
    found = {}
    for name, path, link in sorted(walk(stage / OUTPUTS)):
        stat = os.stat(path)
        found[name] = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256(path)}
        if link:
            found[name]["link"] = True
    return found


def settle(stage: Path, root: Path) -> None:
    """Make the outputs fit to be kept: absolute links within the root become relative, so that it can be moved.

    Raises
    ------
    ArtifactError
        A link leads nowhere, or something is no file: a pipe, a socket.
    """
    base = stage / OUTPUTS
    for name, said in links(stage).items():
        path = base / name
        if os.path.isabs(said) and Path(said).is_relative_to(root):
            path.unlink()
            path.symlink_to(os.path.relpath(said, path.parent))
    for name, path, _ in walk(base):
        if not path.is_file():
            what = f"a link to nothing ({os.readlink(path)!r})" if path.is_symlink() else "a pipe, socket or device"
            raise ArtifactError(
                f"the output {name!r} of the stage in {stage} is {what}; remove it before the stage ends"
            )


def links(stage: Path) -> dict[str, str]:
    """Return what the links among the outputs say: relative paths within the root, else absolute ones."""
    found = {}
    base = stage / OUTPUTS
    for at, folders, files in os.walk(base):
        for name in (*folders, *files):
            path = os.path.join(at, name)
            if os.path.islink(path):
                found[os.path.relpath(path, base).replace(os.sep, "/")] = os.readlink(path)
    return found


def empty(stage: Path) -> list[str]:
    """Return the folders among the outputs that hold nothing."""
    base = stage / OUTPUTS
    walked = ((at, folders or files) for at, folders, files in os.walk(base))
    return sorted(os.path.relpath(at, base).replace(os.sep, "/") for at, held in walked if not held and at != str(base))


def content(entries: Mapping[str, Mapping[str, Any]], extra: str | None = None) -> str:
    """Return one digest of outputs, given what is recorded of them; `extra` stands for the metrics."""
    lines = [f"{name}\0{entry.get('sha256')}" for name, entry in sorted(entries.items())]
    return encoding.sha256_of([*lines, extra or ""])


def unchanged(stage: Path, meta: Mapping[str, Any], *, read: bool = False) -> bool:
    """Return whether outputs and metrics of a stage are those recorded.

    Size and time decide where both agree, and the content where only the time differs; `read` reads all content.
    """
    entries = meta.get("outputs")
    if not isinstance(entries, Mapping):
        return False
    present = {name: path for name, path, _ in walk(stage / OUTPUTS)}
    if present.keys() != entries.keys():
        return False
    for name, path in present.items():
        entry = entries[name]
        try:
            stat = os.stat(path)
            if stat.st_size != entry["size"]:
                return False
            if (read or stat.st_mtime_ns != entry["mtime_ns"]) and sha256(path) != entry["sha256"]:
                return False
        except OSError:
            return False
    return metrics_digest(stage) == meta.get("metrics_sha256")


def read_meta(stage: Path) -> dict[str, Any]:
    """Return ``_meta.json`` of a stage; empty if there is none, or one that says what it cannot mean."""
    meta = encoding.read_json(stage / META)
    if not isinstance(meta, dict):
        return {}
    entries, said, bare = meta.get("outputs", {}), meta.get("links", {}), meta.get("empty", [])
    if not (isinstance(entries, dict) and isinstance(said, dict) and isinstance(bare, list)):
        return {}
    if not isinstance(meta.get("checkpoints", []), list) or not all(_inside(name) for name in (*entries, *said, *bare)):
        return {}
    whole = all(
        isinstance(entry, dict) and {"size", "mtime_ns", "sha256"} <= entry.keys() for entry in entries.values()
    )
    return meta if whole and all(isinstance(to, str) for to in said.values()) else {}


def _inside(name: object) -> bool:
    return isinstance(name, str) and not os.path.isabs(name) and ".." not in name.replace(os.sep, "/").split("/")


def metrics_digest(stage: Path) -> str | None:
    """Return the digest of a stage's metrics; None without any."""
    try:
        return sha256(stage / METRICS)
    except OSError:
        return None


def remove(path: Path) -> None:
    """Remove a file, link or folder, if it is there; what a link leads to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def clear(stage: Path) -> None:
    """Remove what an earlier attempt left in a stage: the key first, so that nothing vouches for the rest."""
    stage.mkdir(parents=True, exist_ok=True)
    for name in (KEY, META):
        remove(stage / name)
    for path in stage.iterdir():
        remove(path)
    (stage / OUTPUTS).mkdir()


def listed(name: str, stage: Path, entries: Mapping[str, Mapping[str, Any]]) -> list[OutputFile]:
    """Return the output files of a stage, as they are and as they are recorded."""
    from diffract_dask.runs.naming import folder

    found = {}
    above = f"stages/{folder(name)}/{OUTPUTS}"
    for below, path, link in walk(stage / OUTPUTS):
        entry = entries.get(below, {})
        try:
            size, missing = os.stat(path).st_size, False
        except OSError:
            size, missing = int(entry.get("size", 0)), True
        found[below] = OutputFile(name, f"{above}/{below}", below, size, entry.get("sha256"), link, missing)
    for below, entry in entries.items():
        if below not in found:
            size, link = int(entry.get("size", 0)), bool(entry.get("link"))
            found[below] = OutputFile(name, f"{above}/{below}", below, size, entry.get("sha256"), link, missing=True)
    return [found[below] for below in sorted(found)]


def take_over(source: Path, meta: Mapping[str, Any], target: Path, how: str) -> bool:
    """Fill a stage from another run's, which has the same key; return whether that one was whole.

    Everything is read and compared with its digest first. The key comes last; without it the stage is not done.
    """
    if not unchanged(source, meta, read=True):
        return False
    clear(target)
    try:
        for name, said in dict(meta.get("links", {})).items():
            path = target / OUTPUTS / name
            path.parent.mkdir(parents=True, exist_ok=True)
            leads_to = Path(os.path.normpath((source / OUTPUTS / name).parent / said))
            own = os.path.isabs(said) or leads_to.is_relative_to(source / OUTPUTS)  # then it stays as it is
            path.symlink_to(said if own else os.path.relpath(leads_to, path.parent))
        for name in meta.get("empty", ()):
            (target / OUTPUTS / name).mkdir(parents=True, exist_ok=True)
        for name, entry in meta["outputs"].items():
            if not entry.get("link"):
                path = target / OUTPUTS / name
                path.parent.mkdir(parents=True, exist_ok=True)
                _take_file(source / OUTPUTS / name, path, how)
        if (source / METRICS).exists():
            shutil.copy2(source / METRICS, target / METRICS)
    except OSError:  # another process has begun to run that stage again, or the disk is full
        return False
    return unchanged(target, meta, read=how == "copy")


def _take_file(source: Path, target: Path, how: str) -> None:
    if how == "link":
        try:
            os.link(source, target)
            return
        except OSError:  # another file system, or one without hard links
            pass
    shutil.copy2(source, target)
