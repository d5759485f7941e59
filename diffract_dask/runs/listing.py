"""The runs below one folder: listing, looking up, reading."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffract_dask.errors import RunNotFoundError, did_you_mean
from diffract_dask.runs import encoding, leases
from diffract_dask.runs.config import Config
from diffract_dask.runs.naming import folder
from diffract_dask.runs.records import SHORT, Metric, OutputFile, RunRecord, parse_record

__all__ = ["RunRegistry"]

_KEYS_SECONDS = 30.0
_NO_RUNS = ("_scripts", "_manifests")  # other names with _ are quoted, but for those of diffman 0.3.0
_SETTLED_NS = 2_000_000_000  # the clock of some file systems is that coarse


class RunRegistry:
    """The runs below a folder; opening one reads nothing and makes nothing.

    Parameters
    ----------
    root : path
        The folder; it is made when the first run is written.
    wait : float or None
        Seconds that a run waits for another process or thread that works on the same run; None waits as long as that
        one lives.
    reuse : {"link", "copy", "no"}
        How a stage is taken over from another run that has its key: hard links where the file system has them,
        copies, or not at all.
    """

    def __init__(
        self, root: str | os.PathLike[str] = "runs", *, wait: float | None = None, reuse: str = "link"
    ) -> None:
        if reuse not in ("link", "copy", "no"):
            raise ValueError(f"reuse is 'link', 'copy' or 'no', not {reuse!r}")
        self.root = Path(os.path.abspath(root))
        self.wait = wait
        self.reuse = reuse
        self._cache = _Listing(self.root)

    def __repr__(self) -> str:
        return f"RunRegistry({str(self.root)!r})"

    def list_runs(
        self,
        pipeline: str | None = None,
        variant: str | None = None,
        *,
        chain: str | None = None,
        variation: str | None = None,
        status: str | None = None,
    ) -> list[RunRecord]:
        """Return the records, the newest first; the arguments keep those that match.

        Files that are no run are left out; what changed on disk since the last call is read again. The records are
        shared between calls: `RunRecord.copy` before changing one.
        """
        found = [
            record
            for record in self._cache.records(None if pipeline is None else folder(pipeline))
            if (pipeline is None or record.pipeline == pipeline)
            and (variant is None or record.variant == variant)
            and (status is None or record.status == status)
            and (
                (chain is None and variation is None)
                or any(
                    chain in (None, at.get("chain")) and variation in (None, at.get("variation"))
                    for at in record.memberships
                )
            )
        ]
        found.sort(key=lambda record: record.started or "", reverse=True)
        return found

    def get(self, pipeline: str, variant: str, fingerprint: str) -> RunRecord:
        """Return one run by the start of its fingerprint.

        Raises
        ------
        RunNotFoundError
            There is none, or more than one.
        """
        among = self.list_runs(pipeline, variant)
        found = [record for record in among if record.fingerprint.startswith(fingerprint.lower())]
        if len(found) == 1:
            return found[0]
        if found:
            raise RunNotFoundError(
                f"{len(found)} runs of {pipeline}/{variant} start with {fingerprint!r}: "
                f"{', '.join(record.fingerprint[:20] for record in found)}; give more digits"
            )
        if among:
            hint = f" Its runs are {', '.join(record.short_fp for record in among[:10])}."
        else:
            known = {f"{record.pipeline}/{record.variant}" for record in self.list_runs()}
            hint = f" It has no runs.{did_you_mean(f'{pipeline}/{variant}', known)}"
        raise RunNotFoundError(f"no run of {pipeline}/{variant} under {self.root} starts with {fingerprint!r}.{hint}")

    def find(self, prefix: str) -> list[RunRecord]:
        """Return the runs whose fingerprint, or whose variant's fingerprint, starts so."""
        prefix = prefix.strip().lower()
        return [
            record
            for record in self.list_runs()
            if record.fingerprint.startswith(prefix) or (record.variant_fingerprint or "").startswith(prefix)
        ]

    def exact(self, pipeline: str, variant: str, fingerprint: str) -> RunRecord | None:
        """Return the run with this very fingerprint, or None; reads one file."""
        above = f"{self.root}/{folder(pipeline)}/{folder(variant)}"
        for name in (fingerprint[:SHORT], fingerprint):
            record = self._cache.one(f"{above}/{name}")
            if record is None or record.fingerprint == fingerprint:
                return record
        return None

    def at(self, where: str) -> RunRecord:
        """Return the run in a folder that is named relative to the root, as ``RunRecord.where`` does.

        Raises
        ------
        RunNotFoundError
            There is none.
        """
        parts = Path(where).parts
        record = self._cache.one(str(self.root.joinpath(*parts))) if len(parts) == 3 and ".." not in parts else None
        if record is None:
            raise RunNotFoundError(f"there is no run {where!r} under {self.root}")
        return record

    def run_path(self, pipeline: str, variant: str, fingerprint: str) -> Path:
        """Return the folder of a run, whether or not it exists.

        It is named after the first digits of the fingerprint; after all of them where another run has those.
        """
        above = self.root / folder(pipeline) / folder(variant)
        short = above / fingerprint[:SHORT]
        other = encoding.read_json(short / "run.json")
        taken = isinstance(other, dict) and other.get("fingerprint") not in (None, fingerprint)
        return above / fingerprint if taken else short

    def config(self, record: RunRecord) -> Config:
        """Return the merged configuration of a run."""
        data = encoding.read_json(_folder(record) / "config.json", {})
        found = encoding.decode(data)
        return Config(found if isinstance(found, dict) else {})

    def meta(self, record: RunRecord, stage: str) -> dict[str, Any]:
        """Return ``_meta.json`` of a stage: key, components, times, outputs; empty if it has not ended well."""
        from diffract_dask.runs.outputs import read_meta

        return read_meta(self.stage_path(record, stage))

    def metrics(self, record: RunRecord, stage: str | None = None) -> dict[str, dict[str, Metric]]:
        """Return the metrics of a run by stage and name, those of a stage at work too."""
        found: dict[str, dict[str, Metric]] = {}
        for name in self.stage_names(record) if stage is None else [stage]:
            values = record.metrics.get(name)
            if values is None and (record.schema == 0 or record.stage_status.get(name) not in ("done", "cached")):
                values = encoding.read_json(self.stage_path(record, name) / "metrics.json")
            if isinstance(values, dict) and values:
                found[name] = {key: as_metric(value) for key, value in values.items()}
        return found

    def stage_path(self, record: RunRecord, stage: str) -> Path:
        """Return the folder of a stage."""
        return _folder(record) / "stages" / folder(stage)

    def stage_names(self, record: RunRecord) -> list[str]:
        """Return the stages of a run in the order of its pipeline."""
        return record.stages or list(record.stage_status)

    def outputs(self, record: RunRecord, stage: str | None = None) -> list[OutputFile]:
        """Return the files that the stages put out, sorted by path within each."""
        from diffract_dask.runs.outputs import listed

        found = []
        for name in self.stage_names(record) if stage is None else [stage]:
            found += listed(name, self.stage_path(record, name), self.meta(record, name).get("outputs", {}))
        return found

    def stage_sources(self, pipeline: str, stage: str, key: str) -> list[RunRecord]:
        """Return runs of a pipeline that have a stage with this key; those of others may be half a minute late."""
        return self._cache.with_key(folder(pipeline), stage, key)

    def note(self, record: RunRecord) -> None:
        """Take note of a record that this process has just written."""
        self._cache.put(record.copy())

    def invalidate(self) -> None:
        """Forget what was read."""
        self._cache = _Listing(self.root)


def as_metric(value: Any) -> Metric:
    """Return a metric from its form in a file; diffman 0.3.0 wrote the bare value."""
    if isinstance(value, dict) and "value" in value:
        return Metric(encoding.decode(value["value"]), value.get("units"), value.get("direction"))
    return Metric(encoding.decode(value))


def _folder(record: RunRecord) -> Path:
    if record.path is None:
        raise RunNotFoundError(f"the record of {record.pipeline}/{record.variant} was not read from a registry")
    return record.path


class _Listing:
    """Records by folder, kept while the modification times of the folders stay.

    A run.json is always replaced, never changed in place, and so the time of its folder tells.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._children: dict[str, tuple[int, list[str]]] = {}
        self._records: dict[str, tuple[int, int, RunRecord | None, bool]] = {}
        self._keys: dict[str, tuple[float, dict[tuple[str, str], dict[str, RunRecord]]]] = {}
        self._lock = threading.RLock()

    def with_key(self, pipeline: str, stage: str, key: str) -> list[RunRecord]:
        with self._lock:
            read, table = self._keys.get(pipeline, (-_KEYS_SECONDS, {}))
            if time.monotonic() - read > _KEYS_SECONDS:
                table = {}
                for record in self.records(pipeline):
                    _index(table, record)
                self._keys[pipeline] = (time.monotonic(), table)
            return list(table.get((stage, key), {}).values())

    def put(self, record: RunRecord) -> None:
        with self._lock:
            if record.path is not None:
                self._records.pop(str(record.path), None)
                kept = self._keys.get(record.path.parent.parent.name)
                if kept is not None:
                    _index(kept[1], record)

    def records(self, pipeline: str | None = None) -> list[RunRecord]:
        with self._lock, _no_collection():
            root = str(self.root)
            above = self._subfolders(root) if pipeline is None else [f"{root}/{pipeline}"]
            paths = [path for each in above for variant in self._subfolders(each) for path in self._subfolders(variant)]
            return [record for path in paths if (record := self._read(path)) is not None]

    def one(self, path: str) -> RunRecord | None:
        with self._lock:
            return self._read(path)

    def _subfolders(self, path: str) -> list[str]:
        """Return the folders in a folder, but for hidden ones and those that hold no runs."""
        try:
            stamp = os.stat(path).st_mtime_ns
            kept = self._children.get(path)
            if kept is None or kept[0] != stamp:
                with os.scandir(path) as entries:
                    names = [
                        item.path
                        for item in entries
                        if item.name[0] != "." and item.name not in _NO_RUNS and item.is_dir()
                    ]
                kept = (stamp if _settled(stamp) else -1, sorted(names))
                self._children[path] = kept
            return kept[1]
        except OSError:
            self._children.pop(path, None)
            return []

    def _read(self, path: str) -> RunRecord | None:
        file = f"{path}/run.json"
        try:
            stat = os.stat(file)
        except OSError:
            self._records.pop(path, None)
            return None
        kept = self._records.get(path)
        if kept is None or kept[0] != stat.st_mtime_ns or kept[1] != stat.st_ino:
            record = parse_record(encoding.read_json(file), path, self.root)
            at_work = record is not None and (record.ended is None or "running" in record.stage_status.values())
            kept = (stat.st_mtime_ns, stat.st_ino, record, at_work)
            self._records[path] = kept
        record = kept[2]
        return leases.observed(record) if kept[3] and record is not None else record


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from going over ten thousand new records again and again: a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _index(table: dict[tuple[str, str], dict[str, RunRecord]], record: RunRecord) -> None:
    for stage, key in record.stage_keys.items():
        if record.stage_status.get(stage) in ("done", "cached"):
            table.setdefault((stage, key), {})[record.where] = record


def _settled(stamp: int) -> bool:
    """Return whether a time is old enough that a later change must show another one."""
    return time.time_ns() - stamp > _SETTLED_NS
