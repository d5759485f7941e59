"""What is known of one run: ``run.json`` and the files beside it."""

from __future__ import annotations

import dataclasses
import os
import typing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from diffract_dask.errors import RunFormatError
from diffract_dask.runs import encoding

__all__ = ["SCHEMA", "Metric", "OutputFile", "RunRecord", "now", "read_record", "refuse_newer"]

SCHEMA = 1
SHORT = 12


def now() -> str:
    """Return the present time with its zone, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True, slots=True)
class Metric:
    """A number, text or truth value that a stage reported.

    Attributes
    ----------
    value : bool, int, float or str
    units : str or None
    direction : {"lower", "higher"} or None
        Which is better.
    """

    value: Any
    units: str | None = None
    direction: str | None = None


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file among the outputs of a stage.

    Attributes
    ----------
    stage : str
    path : str
        Relative to the run's folder: ``stages/<stage>/outputs/<relpath>``.
    relpath : str
        Relative to the outputs of the stage.
    size : int
        In bytes.
    sha256 : str or None
        As recorded at the end of the stage; None before that.
    link : bool
        It is a link to data elsewhere.
    missing : bool
        It was recorded and is gone, or is a link to nothing.
    """

    stage: str
    path: str
    relpath: str
    size: int
    sha256: str | None = None
    link: bool = False
    missing: bool = False


@dataclass(slots=True)
class RunRecord:
    """One run: ``<root>/<pipeline>/<variant>/<short-fp>/run.json``.

    Attributes
    ----------
    pipeline, variant : str
    fingerprint : str
        Of the run: variant, code of all stages, upstream runs. 64 hexadecimal digits.
    module : str or None
        Where pipeline and variant are declared.
    parent : str or None
        The pipeline that this one is forked from.
    base, forks_of : str or None
        Of the variant.
    variant_fingerprint : str or None
        Of the merged configuration alone.
    started, ended : str or None
        ISO 8601 with zone; of the last invocation that computed something.
    stages : list of str
        In the order of the pipeline.
    stage_keys, stage_status, errors : dict by stage
        Status is one of pending, running, done, cached, failed, interrupted, skipped. In ``run.json``, done means
        computed here and cached taken over from another run; in the record that ``Pipeline.run`` returns, cached is
        also what that call found done.
    code : dict by stage
        Hash of each stage's code, or its declared version.
    metrics : dict of dict
        By stage and name: ``{"value", "units", "direction"}``, as of the end of the stage.
    computed_by : dict by stage
        Who computed it: ``{"run", "fingerprint", "invocation", "host", "pid", "ended"}``; `run` is a path relative to
        the root.
    checkpoints : list of dict
        What ``ctx.checkpoint`` registered.
    chain, variation : str or None
        Those of the first call; every one is in `memberships`.
    memberships : list of dict
        ``{"chain", "variation", "step"}``.
    upstream : dict
        Fingerprint of the upstream run, by step.
    upstream_runs : dict
        Its path relative to the root, by step.
    snapshot : str or None
        Commit in ``<root>/_scripts`` that holds the sources.
    sources : dict
        Path in that commit, by module.
    git_rev, git_dirty
        Of the repository that holds the pipeline's file.
    host, pid, user, command, python, versions
        Of the last invocation that computed something.
    warnings : list of str
        What did not stop the run and should be known: no git, an upstream that changed.
    schema : int
    location : str or None
        The run's folder as text; it follows from where the record was read, and is never stored.
    root : Path or None
    gone : bool
        It has not ended, and whoever worked on it is gone; never stored.
    """

    pipeline: str
    variant: str
    fingerprint: str
    module: str | None = None
    parent: str | None = None
    base: str | None = None
    forks_of: str | None = None
    variant_fingerprint: str | None = None
    started: str | None = None
    ended: str | None = None
    stages: list[str] = field(default_factory=list)
    stage_keys: dict[str, str] = field(default_factory=dict)
    stage_status: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    computed_by: dict[str, dict[str, Any]] = field(default_factory=dict)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    chain: str | None = None
    variation: str | None = None
    memberships: list[dict[str, str | None]] = field(default_factory=list)
    upstream: dict[str, str] = field(default_factory=dict)
    upstream_runs: dict[str, str] = field(default_factory=dict)
    snapshot: str | None = None
    sources: dict[str, str] = field(default_factory=dict)
    git_rev: str | None = None
    git_dirty: bool | None = None
    host: str | None = None
    pid: int | None = None
    user: str | None = None
    command: list[str] = field(default_factory=list)
    python: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    schema: int = SCHEMA
    location: str | None = field(default=None, compare=False, repr=False)
    root: Path | None = field(default=None, compare=False, repr=False)
    gone: bool = field(default=False, compare=False, repr=False)

    @property
    def path(self) -> Path | None:
        """The run's folder; it follows from where the record was read, and is never stored."""
        return None if self.location is None else Path(self.location)

    @property
    def short_fp(self) -> str:
        """The first twelve digits of the fingerprint."""
        return self.fingerprint[:SHORT]

    @property
    def fdir(self) -> str:
        """The run's folder as text."""
        return self.location or ""

    @property
    def where(self) -> str:
        """The run's folder relative to the root: what other records call it by."""
        if self.location is None or self.root is None:
            return f"{self.pipeline}/{self.variant}/{self.short_fp}"
        return self.location[len(str(self.root)) + 1 :].replace(os.sep, "/")

    @property
    def status(self) -> str:
        """Of the run as a whole: pending, running, done, failed, interrupted or partial (stages were skipped)."""
        found = set(self.stage_status.values())
        for name in ("running", "failed", "interrupted"):
            if name in found:
                return name
        if found and found <= {"done", "cached"} and all(stage in self.stage_status for stage in self.stages):
            return "done"
        if self.ended is None:
            return "pending" if self.started is None else "interrupted" if self.gone else "running"
        return "partial" if found else "done"

    def as_dict(self) -> dict[str, Any]:
        """Return what ``run.json`` holds."""
        return {name: getattr(self, name) for name in _STORED}

    def copy(self) -> RunRecord:
        """Return a record that can be changed without changing this one."""
        fresh: dict[str, Any] = {
            name: type(value)(value) if isinstance(value := getattr(self, name), (list, dict)) else value
            for name in (*_STORED, *_NOT_STORED)
        }
        return RunRecord(**fresh)


_NOT_STORED = ("location", "root", "gone")
_STORED = tuple(item.name for item in dataclasses.fields(RunRecord) if item.name not in _NOT_STORED)
_HINTS = typing.get_type_hints(RunRecord)
_KNOWN = set(_STORED)
_SHAPES: list[tuple[str, type]] = [
    (name, dict if str(_HINTS[name]).startswith("dict") else list)
    for name in _STORED
    if str(_HINTS[name]).startswith(("dict", "list"))
]


_INNER: dict[str, type] = {
    **dict.fromkeys(("stages", "stage_keys", "stage_status", "errors", "code", "upstream", "upstream_runs"), str),
    **dict.fromkeys(("memberships", "checkpoints", "metrics", "computed_by"), dict),
    **dict.fromkeys(("sources", "warnings", "command"), str),
}


def _holds(name: str, value: Any) -> bool:
    """Return whether a list or mapping of a record holds what it should; a file may have been written by anybody."""
    inner = _INNER.get(name)
    return inner is None or set(map(type, value.values() if isinstance(value, dict) else value)) <= {inner}


def parse_record(data: Any, location: str, root: Path) -> RunRecord | None:
    """Return a record from what ``run.json`` held; None if that is not one. Unknown keys are left out.

    Files of diffman 0.3.0 have no schema: their times are local, and the path they name is not believed.
    """
    if not isinstance(data, dict):
        return None
    if data.keys() != _KNOWN:
        data = {name: value for name, value in data.items() if name in _KNOWN}
    if not all(isinstance(data.get(name), str) for name in ("pipeline", "variant", "fingerprint")):
        return None
    for name, shape in _SHAPES:
        if name in data and (type(data[name]) is not shape or not _holds(name, data[name])):
            del data[name]
    for name in ("started", "ended"):
        if not isinstance(data.get(name), str):
            data[name] = None
    record = RunRecord(**data, location=location, root=root)
    if "schema" not in data:
        _adopt(record)
    return record


def _adopt(record: RunRecord) -> None:
    """Fill what a file of diffman 0.3.0 says in other places."""
    record.schema = 0
    record.stages = list(record.stage_keys)
    record.started, record.ended = (_with_zone(text) for text in (record.started, record.ended))
    if record.chain:
        record.memberships = [{"chain": record.chain, "variation": record.variation, "step": None}]


def _with_zone(text: str | None) -> str | None:
    try:
        return text and datetime.fromisoformat(text).astimezone().isoformat()
    except (TypeError, ValueError):
        return None


def read_record(path: str | os.PathLike[str], root: Path) -> RunRecord | None:
    """Return the record of a run's folder; None if it holds none that can be read."""
    return parse_record(encoding.read_json(os.path.join(path, "run.json")), os.fspath(path), root)


def refuse_newer(record: RunRecord) -> None:
    """Raise RunFormatError before a record of a later version is written over: what it says more would be lost."""
    if record.schema > SCHEMA:
        raise RunFormatError(
            f"run {record.where} was written by a later version of diffract_dask (format {record.schema}, known is "
            f"{SCHEMA}); upgrade diffract_dask, or run with another root"
        )
