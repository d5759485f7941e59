"""The artifacts of runs: listing them, and previewing and comparing them by stage and path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffract_dask.errors import ArtifactError, ArtifactNotFoundError, did_you_mean
from diffract_dask.runs.artifact_diffs import ArtifactDiff, diff_artifacts
from diffract_dask.runs.artifact_kinds import is_unit, kind_of
from diffract_dask.runs.previews import Preview, preview
from diffract_dask.runs.records import RunRecord
from diffract_dask.runs.weight_diffs import diff_metrics

if TYPE_CHECKING:
    from diffract_dask.runs.listing import RunRegistry

__all__ = ["Artifact", "diff_run_artifacts", "find_artifact", "list_artifacts", "preview_run_artifact"]


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file among the outputs of a stage, or a folder that is one artifact (a Zarr or weight store).

    Parameters
    ----------
    stage, relpath : str
        Together its address: ``stage/relpath``.
    path : str
        Relative to the run's folder.
    kind, view : str
        See :mod:`diffract_dask.runs.artifact_kinds`; empty if it is gone.
    size : int
        In bytes, all files together.
    files : int
    link : bool
        The data lies outside the run.
    missing : bool
        Recorded, and gone.
    """

    stage: str
    relpath: str
    path: str
    kind: str
    view: str
    size: int
    files: int = 1
    link: bool = False
    missing: bool = False

    @property
    def address(self) -> str:
        """``stage/relpath``."""
        return f"{self.stage}/{self.relpath}"


def list_artifacts(registry: RunRegistry, record: RunRecord, stage: str | None = None) -> list[Artifact]:
    """Return the artifacts of a run, or of one stage of it, in the order of the stages.

    Raises
    ------
    ArtifactError
        The run has no such stage.
    """
    stages = registry.stage_names(record)
    if stage is not None and stage not in stages:
        raise ArtifactError(f"{record.where} has no stage {stage!r}.{did_you_mean(stage, stages)}")
    found: dict[str, Artifact] = {}
    units: dict[Path, bool] = {}
    for file in registry.outputs(record, stage):
        whole = _unit(_folder(record), file.path, file.relpath, units)
        if whole in found:
            one = found[whole]
            found[whole] = replace(one, size=one.size + file.size, files=one.files + 1, link=one.link or file.link)
            continue
        missing = file.missing and whole == file.path
        kind = None if missing else kind_of(_folder(record) / whole)
        relpath = file.relpath[: len(file.relpath) - (len(file.path) - len(whole))]
        found[whole] = Artifact(
            file.stage,
            relpath,
            whole,
            kind.name if kind else "",
            kind.view if kind else "",
            file.size,
            link=file.link,
            missing=missing,
        )
    return list(found.values())


def _folder(record: RunRecord) -> Path:
    if record.path is None:
        raise ArtifactError(f"the record of {record.where} was not read from a folder")
    return record.path


def _unit(run: Path, path: str, relpath: str, units: dict[Path, bool]) -> str:
    """Return the outermost folder above a file that is one artifact, or the file itself."""
    parts = Path(path).parts
    for depth in range(len(parts) - len(Path(relpath).parts) + 1, len(parts)):
        above = run.joinpath(*parts[:depth])
        if above not in units:
            units[above] = is_unit(above)
        if units[above]:
            return "/".join(parts[:depth])
    return path


def find_artifact(registry: RunRegistry, record: RunRecord, address: str) -> Artifact:
    """Return an artifact by ``stage/relpath``, by its path in the run's folder, or by its name if only one has it.

    Raises
    ------
    ArtifactNotFoundError
        There is none, or it is gone.
    ArtifactError
        Several stages have one of this name.
    """
    among = list_artifacts(registry, record)
    wanted = address.strip("/")
    found = [one for one in among if wanted in (one.address, one.path)] or [
        one for one in among if wanted in (one.relpath, Path(one.relpath).name)
    ]
    if len(found) > 1:
        raise ArtifactError(f"{record.where} has {', '.join(one.address for one in found)}; name one of them")
    if not found:
        known = [one.address for one in among]
        hint = did_you_mean(address, known) or (f" There are {', '.join(known[:20])}." if known else " It has none.")
        raise ArtifactNotFoundError(f"{record.where} has no artifact {address!r}.{hint}")
    if found[0].missing:
        raise ArtifactNotFoundError(f"{record.where}: {found[0].address} was recorded, and is gone")
    return found[0]


def preview_run_artifact(
    registry: RunRegistry, record: RunRecord, address: str, dataset: str | None = None, **options: Any
) -> Preview:
    """Return what an artifact of a run holds; `options` as for :func:`~diffract_dask.runs.previews.preview`."""
    found = find_artifact(registry, record, address)
    return preview(_folder(record) / found.path, dataset, **options)


def diff_run_artifacts(
    registry: RunRegistry,
    a: RunRecord,
    b: RunRecord,
    address: str,
    address_b: str | None = None,
    *,
    dataset: str | None = None,
    dataset_b: str | None = None,
    index: Sequence[int] | None = None,
    target: int = 256,
) -> ArtifactDiff:
    """Return how an artifact of run `b` differs from the matching one of run `a`.

    Parameters
    ----------
    registry : RunRegistry
    a, b : RunRecord
    address : str
        As for :func:`find_artifact`.
    address_b : str, optional
        Default: the artifact of the same stage and path.
    dataset, dataset_b, index, target
        As for :func:`~diffract_dask.runs.artifact_diffs.diff_artifacts`.

    Notes
    -----
    Of checkpoints that both runs registered in a weight store, the changes of the stored metrics are given too.
    """
    ours = find_artifact(registry, a, address)
    theirs = find_artifact(registry, b, address_b if address_b is not None else ours.address)
    found = diff_artifacts(
        _folder(a) / ours.path,
        _folder(b) / theirs.path,
        dataset,
        dataset_b=dataset_b,
        index=index,
        target=target,
    )
    models = found.data.get("models", [])
    if found.view == "weights" and len(models) == 1 and not models[0]["metrics"]:
        before, after = _registered(a, ours), _registered(b, theirs)
        if before is not None and after is not None:
            from diffract_dask.runs.weights import stored_metrics

            models[0]["metrics"] = diff_metrics(stored_metrics(*before), stored_metrics(*after))
    return found


def _registered(record: RunRecord, artifact: Artifact) -> tuple[str, str] | None:
    """Return the store (a path) and the model id that an artifact was registered as; the last time counts."""
    for entry in reversed(record.checkpoints):
        store = entry.get("store")
        if entry.get("source") == artifact.path and store and record.root is not None:
            return store if "://" in store else str(record.root / store), entry["model_id"]
    return None
