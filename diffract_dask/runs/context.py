"""What a stage's function is given."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from diffract_dask.errors import ArtifactError, ArtifactNotFoundError, UnknownNameError, did_you_mean
from diffract_dask.runs import encoding, outputs
from diffract_dask.runs.naming import check_known, check_name, folder, inside
from diffract_dask.runs.records import RunRecord, now

if TYPE_CHECKING:
    from diffract_dask.runs.config import Config
    from diffract_dask.runs.variants import Variant

__all__ = ["RunContext"]

HOW = ("copy", "link", "move")
DIRECTIONS = ("lower", "higher")


class RunContext:
    """A run, as the function of one of its stages sees it. It can be sent to other threads and processes.

    Attributes
    ----------
    variant : Variant
    record : RunRecord
        A copy; changing it changes nothing on disk.
    stage : str
        The stage that runs.
    path : Path
        The run's folder; `fdir` is the same as text.
    root : Path
        The folder of all runs.
    upstream : dict
        Record of the upstream run, by step of the chain.
    """

    def __init__(
        self,
        path: Path,
        root: Path,
        variant: Variant,
        record: RunRecord,
        stage: str,
        upstream: Mapping[str, RunRecord],
        *,
        inputs: Iterable[str] = (),
        upstream_read: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.path = path
        self.root = root
        self.variant = variant
        self.record = record
        self.stage = stage
        self.upstream = dict(upstream)
        self._inputs = set(inputs)
        self._upstream_read = upstream_read

    @property
    def fdir(self) -> str:
        """The run's folder as text."""
        return str(self.path)

    @property
    def config(self) -> Config:
        """The variant's merged configuration."""
        return self.variant.config

    def stage_dir(self, stage: str | None = None) -> Path:
        """Return the folder of a stage, by default of the one that runs; its ``outputs/`` exists.

        Raises
        ------
        UnknownNameError
            The pipeline has no such stage, or it is not among the inputs, nor among theirs.
        """
        name = self.stage if stage is None else stage
        check_known([name], self.record.stages, "stage", f"pipeline {self.record.pipeline!r}")
        if name != self.stage and name not in self._inputs:
            raise UnknownNameError(
                f"stage {self.stage!r} reads stage {name!r}, which is not among its inputs; a change of it "
                f"would go unseen. Add it: Stage({self.stage!r}, …, inputs=({name!r},)), after {name!r}"
            )
        path = self.path / "stages" / folder(name)
        if name == self.stage:
            (path / outputs.OUTPUTS).mkdir(parents=True, exist_ok=True)
        return path

    def _own_dir(self, stage: str, what: str) -> Path:
        check_known([stage], self.record.stages, "stage", f"pipeline {self.record.pipeline!r}")
        if stage != self.stage:
            raise ArtifactError(
                f"{what} is for stage {stage!r}, and stage {self.stage!r} is the one that runs; a stage that has ended "
                "keeps what it put out"
            )
        path = self.stage_dir(stage)
        if (path / outputs.KEY).exists():  # a thread or process of its own that nobody waited for
            raise ArtifactError(f"{what} comes after the end of stage {stage!r}; wait for all that it starts")
        return path

    def artifact(
        self,
        stage: str,
        relpath: str | os.PathLike[str],
        source: str | os.PathLike[str] | None = None,
        *,
        how: str = "copy",
    ) -> Path:
        """Keep a file or folder as ``stages/<stage>/outputs/<relpath>`` and return where it lies.

        Parameters
        ----------
        stage : str
            The stage that runs.
        relpath : path
            Relative, without ``..``.
        source : path, optional
            What to keep; without it, the path to write to is returned, its folder made.
        how : {"copy", "link", "move"}
            A link leaves the data where it is, so that the run depends on it. A source that lies there already stays
            as it is.

        Raises
        ------
        ArtifactNotFoundError
            There is no such source.
        ArtifactError
            A path leaves the outputs, source and target contain each other, or the stage is not the one that runs.
        """
        what = f"the artifact {os.fspath(relpath)!r}"
        base = self._own_dir(stage, what) / outputs.OUTPUTS
        target = inside(base, relpath, what)
        if how not in HOW:
            raise ArtifactError(f"{what}: how is one of {', '.join(HOW)}, not {how!r}")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.parent.resolve().is_relative_to(base.resolve()):
            raise ArtifactError(f"{what} would be written through a link that leads out of the run")
        if source is None:
            if target.is_symlink():  # what is written is to go here, and not where the link leads
                target.unlink()
            return target
        origin = Path(os.path.abspath(source))
        if not origin.exists():
            raise ArtifactNotFoundError(f"{what} is to be kept from {str(origin)!r}, which does not exist")
        if target.exists() and (origin == target or origin.samefile(target)):
            return target
        ends = origin.resolve(), base.resolve() / target.relative_to(base)
        if ends[0].is_relative_to(ends[1]) or ends[1].is_relative_to(ends[0]):
            raise ArtifactError(f"{what} and its source {str(origin)!r} contain each other")
        real = Path(os.path.realpath(origin.parent), origin.name)
        if how == "move" and real.is_relative_to(self.root.resolve()) and not real.is_relative_to(base.resolve()):
            raise ArtifactError(
                f"{what} would be moved from {str(origin)!r}, which belongs to another stage or run; use how='copy' or "
                "how='link'"
            )
        said = str(origin)
        if origin.is_relative_to(self.root):  # a link within the root stays good when the root is moved
            said = os.path.relpath(origin, target.parent)
        linked = how == "move" and origin.is_symlink()  # the link goes, and what it leads to is not ours to move
        try:
            _place(origin, target, "copy" if linked else how, said)
        except shutil.Error as error:
            raise ArtifactError(f"{what}: not all of {str(origin)!r} can be copied: {error.args[0]}") from error
        if linked:
            origin.unlink()
        return target

    def metric(
        self, stage: str, name: str, value: Any, *, units: str | None = None, direction: str | None = None
    ) -> None:
        """Report a number, truth value or text; the last one of a name counts. Threads and processes may call it.

        Parameters
        ----------
        stage : str
            The stage that runs.
        name : str
        value : bool, int, float, str, or a NumPy scalar
        units : str, optional
        direction : {"lower", "higher"}, optional
            Which is better.

        Raises
        ------
        ArtifactError
            The value is no scalar, the direction is none, or the stage is not the one that runs.
        """
        check_name(name, "metric")
        path = self._own_dir(stage, f"the metric {name!r}") / outputs.METRICS
        if direction not in (None, *DIRECTIONS):
            raise ArtifactError(f"metric {name!r}: direction is 'lower' or 'higher', not {direction!r}")
        told = {"value": _scalar(name, value), "units": units, "direction": direction}
        _change_json(path, lambda known: {**known, name: told}, {})

    def upstream_artifact(self, step: str, relpath: str | os.PathLike[str] = "") -> Path:
        """Return the path of a file or folder of an upstream run.

        Parameters
        ----------
        step : str
        relpath : path
            From that run's folder: ``stages/<stage>/outputs/<relpath>``; by default the folder itself.

        Raises
        ------
        UnknownNameError
            The step is not consumed, or the stage declares what it reads and this is not among it.
        ArtifactNotFoundError
            There is no such file; the message has the nearest ones.
        """
        check_known(
            [step], self.upstream, "upstream step", f"stage {self.stage!r} of pipeline {self.record.pipeline!r}"
        )
        record = self.upstream[step]
        above = self.root / record.where
        text = os.fspath(relpath).replace(os.sep, "/").rstrip("/")
        path = inside(above, text, "the upstream artifact") if text else above
        allowed = self._upstream_read
        if allowed is not None and not _declared(allowed, step, text):
            raise UnknownNameError(
                f"stage {self.stage!r} declares what it reads upstream, and {text or 'the folder'!r} of step {step!r} "
                f"is not among it; add it: Stage(…, upstream={{{step!r}: {text!r}}})"
            )
        if not path.exists():
            stages = above / "stages"
            near = did_you_mean(text, [f"stages/{name}" for name, _, _ in outputs.walk(stages)])
            raise ArtifactNotFoundError(f"the run {record.where} of upstream step {step!r} has no {text!r}.{near}")
        return path

    def checkpoint(
        self,
        store: str | os.PathLike[str],
        path: Any,
        model_id: str | None = None,
        *,
        parent: str | list[str] | None = None,
        step: float | None = None,
        **options: Any,
    ) -> str:
        """Register a checkpoint in a weight store, with this run and its configuration; return its model id."""
        from diffract_dask.runs import weights

        model_id, entry = weights.register_checkpoint(
            self, store, path, model_id=model_id, parent=parent, step=step, **options
        )
        self._note_checkpoint(entry)
        return str(model_id)

    def _note_checkpoint(self, entry: Mapping[str, Any]) -> None:
        path = self.stage_dir() / "checkpoints.json"
        told = encoding.strict({**entry, "stage": self.stage})
        _change_json(path, lambda known: [*(old for old in known if not _same_model(old, told)), told], [])

    def log(self, message: str) -> None:
        """Add a line to the run's ``run.log``."""
        append_log(self.path, f"{self.stage}: {message}")


def _same_model(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(name) == other.get(name) for name in ("store", "model_id"))


def _declared(allowed: Mapping[str, tuple[str, ...]], step: str, text: str) -> bool:
    if step not in allowed:
        return False
    whole = allowed[step]
    return not whole or any(text == path.rstrip("/") or text.startswith(f"{path.rstrip('/')}/") for path in whole)


def _place(origin: Path, target: Path, how: str, said: str) -> None:
    """Put a source in the place of the target, at once where the target is a file."""
    partial = target.with_name(f".{target.name[:80]}.{os.getpid()}-{threading.get_ident()}.partial")
    outputs.remove(partial)
    try:
        if how == "link":
            partial.symlink_to(said, target_is_directory=origin.is_dir())
        elif how == "move":
            shutil.move(origin, partial)
        elif origin.is_dir():
            shutil.copytree(origin, partial)
        else:
            shutil.copy2(origin, partial)
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        elif partial.is_dir() and not partial.is_symlink():
            outputs.remove(target)
        os.replace(partial, target)
    except BaseException:
        if how != "move":
            outputs.remove(partial)
        raise


def _scalar(name: str, value: Any) -> Any:
    """Return a metric's value as plain JSON data."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (bool, int, float, str)):
        raise ArtifactError(
            f"metric {name!r} is a number, truth value or text, not {type(value).__name__} ({str(value)[:60]}); keep "
            "anything larger as an artifact"
        )
    return encoding.encode(value, f"metric {name!r}")


_guards: dict[str, threading.Lock] = {}


def _change_json(path: Path, change: Any, empty: Any) -> None:
    """Replace a JSON file by what `change` makes of it, one thread and process at a time."""
    guard = _guards.setdefault(str(path), threading.Lock())
    lock = FileLock(path.with_name(f".{path.name}.lock"), thread_local=False)
    with guard, lock.acquire(poll_interval=0.002):
        known = encoding.read_json(path, empty)
        encoding.write_json(path, change(known if isinstance(known, type(empty)) else empty))


def append_log(path: Path, message: str) -> None:
    """Add a line to a run's log, with the time; a log that cannot be written stops nothing."""
    line = f"{now()} {message.rstrip()}\n".encode("utf8", "replace")
    with contextlib.suppress(OSError):
        handle = os.open(path / "run.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)
