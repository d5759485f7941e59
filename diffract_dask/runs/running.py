"""Running a pipeline for a variant: what is done already, what can be taken over, what must be computed."""

from __future__ import annotations

import getpass
import importlib.metadata
import logging
import os
import platform
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffract_dask.errors import DeclarationError, DiffractError, RunInputError, did_you_mean
from diffract_dask.runs import encoding, leases, manifests, outputs, snapshots
from diffract_dask.runs.config import UNSET, pick
from diffract_dask.runs.context import RunContext, append_log
from diffract_dask.runs.naming import check_known, folder, names
from diffract_dask.runs.records import RunRecord, now, read_record, refuse_newer
from diffract_dask.runs.stages import Stage, run_fingerprint
from diffract_dask.runs.variants import Variant

if TYPE_CHECKING:
    from diffract_dask.runs.listing import RunRegistry
    from diffract_dask.runs.pipelines import Pipeline

__all__ = ["run"]

INVOCATIONS = "invocations"
_TOLD_VERSIONS = ("numpy", "scipy", "torch", "xarray", "dask", "zarr", "h5py", "pandas", "jax", "tensorflow")
_log = logging.getLogger("diffract_dask.runs")

Membership = tuple[str | None, str | None, str | None]


def run(
    pipeline: Pipeline,
    variant: Variant,
    registry: RunRegistry,
    force: str | Iterable[str] | None,
    only: str | Iterable[str] | None,
    upstream: Mapping[str, RunRecord],
    membership: Membership,
) -> RunRecord:
    """Run a pipeline; `Pipeline.run` describes it. Everything that can be wrong is checked before a stage runs."""
    forced = set(names(force, "stage"))
    chosen = set(pipeline.stage_names if only is None else names(only, "stage"))
    where = f"pipeline {pipeline.name!r}"
    check_known([*forced, *chosen], pipeline.stage_names, "stage", where)
    if not chosen:
        raise DeclarationError(f"only= names no stage of {where}; leave it out to run all of them")
    if not isinstance(variant, Variant):
        raise DeclarationError(f"{where} runs a variant or the name of one, not {variant!r}")
    pipeline.check_keys(variant)
    for stage in pipeline.stages:
        check_known(stage.upstream or (), upstream, "upstream step", f"the run of stage {stage.name!r} of {where}")
    _check_upstream(where, upstream, registry)
    work = _Work(pipeline, variant, registry, upstream, membership)
    with leases.hold(work.path, registry.wait):
        return work.run(forced, chosen)


def _check_upstream(where: str, upstream: Mapping[str, RunRecord], registry: RunRegistry) -> None:
    for step, record in upstream.items():
        if not isinstance(record, RunRecord):
            raise DeclarationError(f"upstream of {where}: {step!r} is {record!r}, not the record of a run")
        if record.path is None or record.root is None or not _same_folder(record.root, registry.root):
            raise RunInputError(f"the run of upstream step {step!r} is not under {registry.root}; run it there first")
        bad = [name for name in record.stages if record.stage_status.get(name) not in ("done", "cached")]
        if bad:
            raise RunInputError(
                f"{where} needs upstream step {step!r}, whose run {record.where} has not done {', '.join(bad)}"
            )
        for name in record.stages if record.schema else ():
            at = record.path / "stages" / folder(name)
            if not outputs.unchanged(at, outputs.read_meta(at)):
                raise RunInputError(
                    f"{where} reads the run {record.where} as upstream step {step!r}, and what its stage {name!r} put "
                    "out has been changed or removed since; run that pipeline again"
                )


def _same_folder(one: Path, other: Path) -> bool:
    return one == other or (one.exists() and other.exists() and one.samefile(other))


def upstream_content(registry: RunRegistry, record: RunRecord) -> str:
    """Return one digest of all that a run put out."""
    found = []
    for name in record.stages:
        meta = registry.meta(record, name)
        found.append(f"{name}\0{meta.get('outputs_sha256') or meta.get('key')}")
    return encoding.sha256_of(found)


class _Work:
    """One call of `run`."""

    def __init__(
        self,
        pipeline: Pipeline,
        variant: Variant,
        registry: RunRegistry,
        upstream: Mapping[str, RunRecord],
        membership: Membership,
    ) -> None:
        self.pipeline = pipeline
        self.variant = variant
        self.registry = registry
        self.upstream = upstream
        self.membership = membership
        self.codes = pipeline.codes()
        declared = [stage.declaration(self.codes[stage.name]) for stage in pipeline.stages]
        self.fingerprint = run_fingerprint(
            variant.fingerprint, declared, {step: record.fingerprint for step, record in upstream.items()}
        )
        self.path = registry.run_path(pipeline.name, variant.name, self.fingerprint)
        self.components = self._components()
        self.keys = self._keys()
        self.id = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
        self.statuses: dict[str, str] = {}
        self.forced: set[str] = set()
        self.began: str | None = None
        self.taken: snapshots.Snapshot | None = None
        self.record = self._opened()

    def _components(self) -> dict[str, dict[str, Any]]:
        found = {}
        content = {step: upstream_content(self.registry, record) for step, record in self.upstream.items()}
        for stage in self.pipeline.stages:
            code = self.codes[stage.name]
            found[stage.name] = {
                "code": code.code,
                "bound": code.bound,
                "config": encoding.encode(_slice(stage, self.variant), "config"),
                "inputs": {},
                "upstream": self._upstream_of(stage, content),
            }
        return found

    def _upstream_of(self, stage: Stage, content: Mapping[str, str]) -> dict[str, Any]:
        if stage.upstream is None:
            return {
                step: {"run": record.fingerprint, "content": content[step]} for step, record in self.upstream.items()
            }
        found: dict[str, Any] = {}
        for step, paths in stage.upstream.items():
            record = self.upstream[step]
            found[step] = {path: self._digest(stage, step, record, path) for path in paths} or {
                "content": content[step]
            }
        return found

    def _digest(self, stage: Stage, step: str, record: RunRecord, path: str) -> str:
        """Return the digest of an upstream artifact, as that run recorded it."""
        files = {file.path: file.sha256 for file in self.registry.outputs(record) if not file.missing}
        below = {name: {"sha256": digest} for name, digest in files.items() if name.startswith(f"{path.rstrip('/')}/")}
        if path not in files and not below:
            raise RunInputError(
                f"stage {stage.name!r} of pipeline {self.pipeline.name!r} declares the upstream artifact {path!r}, "
                f"which the run {record.where} of step {step!r} does not have.{did_you_mean(path, files)}"
            )
        return str(files[path]) if path in files else outputs.content(below)

    def _keys(self) -> dict[str, str]:
        keys: dict[str, str] = {}
        for stage in self.pipeline.stages:
            parts = self.components[stage.name]
            parts["inputs"] = {name: keys[name] for name in stage.inputs}
            text = encoding.plain_text({"stage": stage.name, **parts})
            keys[stage.name] = encoding.sha256_of([text])
        return keys

    def _opened(self) -> RunRecord:
        """Return the record as it is on disk, or a new one, with what is known before anything runs."""
        chain, variation, step = self.membership
        record = read_record(self.path, self.registry.root)
        if record is None:
            record = RunRecord(
                self.pipeline.name, self.variant.name, self.fingerprint, chain=chain, variation=variation
            )
            record.location, record.root = str(self.path), self.registry.root
        refuse_newer(record)
        record.module, record.parent = self.pipeline.module, self.pipeline.parent
        record.base = self.variant.base.name if self.variant.base else None
        record.forks_of = self.variant.forks_of
        record.variant_fingerprint = self.variant.fingerprint
        record.stages = self.pipeline.stage_names
        record.code = {name: code.code for name, code in self.codes.items()}
        record.upstream = {name: other.fingerprint for name, other in self.upstream.items()}
        record.upstream_runs = {name: other.where for name, other in self.upstream.items()}
        own = {"chain": chain, "variation": variation, "step": step}
        if chain is not None and own not in record.memberships:
            record.memberships = [*record.memberships, own]
            record.chain, record.variation = record.chain or chain, record.variation or variation
        return record

    def stage_path(self, stage: str) -> Path:
        return self.path / "stages" / folder(stage)

    def run(self, forced: set[str], chosen: set[str]) -> RunRecord:
        self.record = self._opened()  # again: another process may have held the run until now
        before = encoding.read_json(self.path / "run.json")
        self.forced = forced
        self._check_needs(chosen | forced)
        todo = [
            stage
            for stage in self.pipeline.stages
            if stage.name in chosen | forced and (stage.name in forced or not self.is_done(stage))
        ]
        if todo or not isinstance(before, dict):
            self._begin()
        try:
            for stage in self.pipeline.stages:
                self._settle(stage, chosen | forced, forced)
        except BaseException:
            self._end()
            raise
        if self.began is not None:
            self._warn(self._restless())
            self._end()
        elif self.record.as_dict() != before:
            self._flush()
        manifests.write(self.registry.root, self.pipeline.module, self.taken)
        answer = self.record.copy()
        answer.stage_status = dict(self.statuses)
        return answer

    def _restless(self) -> str | None:
        """Return a warning for stages whose code refers to something that they change themselves."""
        found = []
        for stage in self.pipeline.stages:
            try:
                same = stage.code().code == self.codes[stage.name].code
            except DiffractError:  # what it holds now has no hash
                same = False
            found += [] if same else [stage.name]
        if not found:
            return None
        return (
            f"what the code of {', '.join(found)} refers to changed while it ran, such as a global list or cache, so "
            "that it will be computed again; move that out, or state a version: Stage(…, version=1)"
        )

    def _check_needs(self, chosen: set[str]) -> None:
        """Refuse to run a stage whose input is neither done nor about to run."""
        for stage in self.pipeline.stages:
            for needed in stage.inputs if stage.name in chosen else ():
                other = next(item for item in self.pipeline.stages if item.name == needed)
                if needed not in chosen and not self.is_done(other):
                    raise RunInputError(
                        f"stage {stage.name!r} of pipeline {self.pipeline.name!r} needs stage {needed!r}, which is not "
                        f"done for {self.variant.name!r}; add it to only="
                    )

    def is_done(self, stage: Stage) -> bool:
        """Return whether a stage is done here with this very key, and is as it was left."""
        path = self.stage_path(stage.name)
        try:
            key = (path / outputs.KEY).read_text(encoding="utf8").strip()
        except (OSError, ValueError):
            return False
        meta = outputs.read_meta(path)
        return (
            key == self.keys[stage.name]
            and meta.get("key") == key
            and meta.get("made_from") == self._made_from(stage)
            and outputs.unchanged(path, meta)
        )

    def _made_from(self, stage: Stage) -> dict[str, str | None]:
        """Return the digests of what the inputs of a stage hold at present."""
        found = {}
        for name in stage.inputs:
            meta = outputs.read_meta(self.stage_path(name))
            found[name] = meta.get("outputs_sha256")
        return found

    def _settle(self, stage: Stage, chosen: set[str], forced: set[str]) -> None:
        """Bring one stage to its state at the end of this call."""
        name = stage.name
        status = self.record.stage_status
        if stage.name not in forced and self.is_done(stage):
            self.statuses[name] = "cached"
            if status.get(name) not in ("done", "cached"):  # killed between the key and the record
                self._note_done(stage, outputs.read_meta(self.stage_path(name)))
                self._flush()
            return
        if name not in chosen:
            self.statuses[name] = "skipped"
            if status.get(name) not in ("failed", "interrupted", "running"):
                self._forget(name)
                status[name] = "skipped"
                self._flush()
            return
        if self.began is None:  # what it was made from has changed within this call
            self._begin()
        if name not in forced and self.registry.reuse != "no" and self._taken_over(stage):
            self.statuses[name] = "cached"
            return
        self._execute(stage)
        self.statuses[name] = "done"

    def _mark_running(self, name: str) -> None:
        """Say that a stage is at work before anything of it is touched: a kill from here on leaves it interrupted."""
        self._forget(name)
        self.record.stage_keys[name] = self.keys[name]
        self.record.stage_status[name] = "running"
        self._flush()

    def _forget(self, name: str) -> None:
        for table in (self.record.errors, self.record.metrics, self.record.computed_by):
            table.pop(name, None)
        self.record.checkpoints = [entry for entry in self.record.checkpoints if entry.get("stage") != name]

    def _taken_over(self, stage: Stage) -> bool:
        """Fill a stage from another run of the pipeline that has its key; return whether there was one."""
        key, name = self.keys[stage.name], stage.name
        for source in self.registry.stage_sources(self.pipeline.name, name, key):
            if source.path is None or source.path == self.path:
                continue
            other = source.path / "stages" / folder(name)
            meta = outputs.read_meta(other)
            if meta.get("key") != key or meta.get("made_from") != self._made_from(stage):
                continue
            target = self.stage_path(name)
            self._mark_running(name)
            if outputs.take_over(other, meta, target, self.registry.reuse):
                encoding.write_json(target / outputs.META, {**meta, "reused_from": source.where})
                encoding.write_text(target / outputs.KEY, key)
                self._forget(name)
                self._note_done(stage, {**meta, "reused_from": source.where})
                by = source.computed_by.get(name)
                if by:
                    self.record.computed_by[name] = dict(by)
                self._flush()
                append_log(self.path, f"{name}: taken over from {source.where}")
                return True
            outputs.clear(target)
        return False

    def _execute(self, stage: Stage) -> None:
        name, path = stage.name, self.stage_path(stage.name)
        self._mark_running(name)
        outputs.clear(path)
        append_log(self.path, f"{name}: started")
        started, clock = now(), time.perf_counter()
        context = RunContext(
            self.path,
            self.registry.root,
            self.variant,
            self.record.copy(),
            name,
            self.upstream,
            inputs=self._inputs_of(stage),
            upstream_read=stage.upstream,
        )
        try:
            stage.fn(context)
            meta = self._finish(stage, started, clock)
        except Exception:
            self._fail(name, "failed", traceback.format_exc())
            raise
        except BaseException as error:  # Ctrl-C, exit
            self._fail(name, "interrupted", f"{type(error).__name__}: {error}")
            raise
        self._note_done(stage, meta)
        self._flush()
        append_log(self.path, f"{name}: done in {meta['seconds']:.3f} s")

    def _inputs_of(self, stage: Stage) -> set[str]:
        """Return the inputs of a stage, and theirs."""
        table = {item.name: item.inputs for item in self.pipeline.stages}
        found: set[str] = set()
        pending = list(stage.inputs)
        while pending:
            name = pending.pop()
            found.add(name)
            pending += table[name]
        return found

    def _finish(self, stage: Stage, started: str, clock: float) -> dict[str, Any]:
        """Record what a stage put out; the key, which says that all is there, comes last."""
        name, path = stage.name, self.stage_path(stage.name)
        (path / outputs.OUTPUTS).mkdir(parents=True, exist_ok=True)
        for left in path.glob(".*.lock"):
            left.unlink(missing_ok=True)
        outputs.settle(path, self.registry.root)
        entries = outputs.recorded(path)
        metrics = outputs.metrics_digest(path)
        meta = {
            "name": name,
            "key": self.keys[name],
            "started": started,
            "ended": now(),
            "seconds": time.perf_counter() - clock,
            "components": self.components[name],
            "made_from": self._made_from(stage),
            "outputs": entries,
            "links": outputs.links(path),
            "empty": outputs.empty(path),
            "metrics_sha256": metrics,
            "outputs_sha256": outputs.content(entries, metrics),
            "checkpoints": encoding.read_json(path / "checkpoints.json", []),
            "computed_by": self._signature(),
        }
        encoding.write_json(path / outputs.META, meta)
        encoding.write_text(path / outputs.KEY, self.keys[name])
        return meta

    def _signature(self) -> dict[str, Any]:
        return {
            "run": self.record.where,
            "fingerprint": self.fingerprint,
            "invocation": self.id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "ended": now(),
        }

    def _note_done(self, stage: Stage, meta: Mapping[str, Any]) -> None:
        name = stage.name
        self._forget(name)
        self.record.stage_keys[name] = self.keys[name]
        self.record.stage_status[name] = "cached" if meta.get("reused_from") else "done"
        values = encoding.read_json(self.stage_path(name) / outputs.METRICS, {})
        if values:
            self.record.metrics[name] = values
        if isinstance(meta.get("computed_by"), dict):
            self.record.computed_by[name] = dict(meta["computed_by"])
        self.record.checkpoints += [entry for entry in meta.get("checkpoints", []) if isinstance(entry, dict)]

    def _fail(self, name: str, status: str, text: str) -> None:
        self.record.stage_status[name] = self.statuses[name] = status
        self.record.errors[name] = text
        append_log(self.path, f"{name}: {status}\n{text.rstrip()}")
        with suppress(OSError):
            self._flush()

    def _begin(self) -> None:
        """Write down that something is about to be computed, by whom and from which sources."""
        self.began = now()
        for left in self.path.glob("*.partial"):  # of a process that was killed
            left.unlink(missing_ok=True)
        record = self.record
        record.started, record.ended = self.began, None
        record.host, record.pid, record.user = socket.gethostname(), os.getpid(), _user()
        record.command, record.python = list(sys.orig_argv), platform.python_version()
        record.versions = versions()
        record.warnings = []
        record.git_rev, record.git_dirty = snapshots.repository_state(self.pipeline.source_file)
        for name in list(record.stage_status):
            if name not in record.stages:
                del record.stage_status[name]
        files = manifests.source_files(self.pipeline, self.codes)
        chain, variation, _ = self.membership
        files |= manifests.chain_files(chain)
        on_behalf = f" for chain {chain}/{variation}" if chain else ""
        taken = snapshots.take(
            self.registry.root, files, f"run {self.pipeline.name}/{self.variant.name}/{record.short_fp}{on_behalf}"
        )
        self.taken = taken
        record.snapshot, record.sources = taken.commit, taken.sources
        self._warn(taken.warning)
        self._warn(_unread(self.pipeline, self.variant))
        encoding.write_json(self.path / "config.json", encoding.encode(self.variant.config, "config"))
        self._flush()
        self._log_invocation(None)

    def _warn(self, text: str | None) -> None:
        if text:
            self.record.warnings.append(text)
            append_log(self.path, f"warning: {text}")

    def _end(self) -> None:
        self.record.ended = now()
        with suppress(OSError):
            self._flush()
            self._log_invocation(self.record.ended)

    def _log_invocation(self, ended: str | None) -> None:
        """Write what this call did to a file of its own, which nothing overwrites."""
        record = self.record
        chain, variation, step = self.membership
        told = ("host", "pid", "user", "command", "python", "versions", "git_rev", "git_dirty", "snapshot", "warnings")
        where = self.path / INVOCATIONS
        where.mkdir(exist_ok=True)
        encoding.write_json(
            where / f"{self.id}.json",
            {
                "id": self.id,
                "started": self.began,
                "ended": ended,
                "chain": chain,
                "variation": variation,
                "step": step,
                "force": sorted(self.forced),
                "stages": self.statuses,
                **{name: getattr(record, name) for name in told},
            },
        )

    def _flush(self) -> None:
        encoding.write_json(self.path / "run.json", self.record.as_dict())
        self.registry.note(self.record)


def _slice(stage: Stage, variant: Variant) -> dict[str, Any]:
    """Return what a stage reads of the configuration, by key or dotted path; what is absent is left out."""
    if not stage.config_keys:
        return {str(key) if isinstance(key, str) else key: value for key, value in variant.config.items()}
    picked = {key: pick(variant.config, key) for key in stage.config_keys}
    return {key: value for key, value in picked.items() if value is not UNSET}


def _unread(pipeline: Pipeline, variant: Variant) -> str | None:
    """Return a warning for keys of the configuration that no stage reads."""
    if not all(stage.config_keys for stage in pipeline.stages):
        return None
    read = {key.partition(".")[0] for stage in pipeline.stages for key in stage.config_keys} | {
        key for stage in pipeline.stages for key in stage.config_keys
    }
    left = [str(key) for key in variant.config if key not in read]
    return f"no stage reads the config keys {', '.join(left)}" if left else None


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return None


def versions() -> dict[str, str]:
    """Return the versions of the packages that matter and are loaded."""
    found = {}
    with suppress(importlib.metadata.PackageNotFoundError):
        found["diffract_dask"] = importlib.metadata.version("diffract_dask")
    for name in _TOLD_VERSIONS:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found
