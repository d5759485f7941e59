"""Stages: functions with a name, declared inputs, and what their keys are made of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffract_dask.errors import DeclarationError
from diffract_dask.runs import encoding
from diffract_dask.runs.code import StageCode, stage_code
from diffract_dask.runs.naming import check_name, names

if TYPE_CHECKING:
    from diffract_dask.runs.context import RunContext

__all__ = ["Stage", "run_fingerprint"]


_LATER = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


@dataclass(frozen=True, init=False)
class Stage:
    """A step of a pipeline: a function of the context, which writes artifacts and metrics.

    Parameters
    ----------
    name : str
    fn : callable
        Called with a `RunContext`; what it returns is ignored.
    inputs : str or iterable of str
        Earlier stages of the pipeline that it reads.
    config_keys : str or iterable of str
        The keys, or dotted paths, of the configuration that it reads; without any, it depends on all of it. A key
        that one variant lacks and another one of the same module has counts as absent.
    version : object
        Stands for the code, which then is not looked at.
    upstream : mapping or iterable of str
        What it reads of the upstream runs of a chain: paths by step, ``{"recon": "stages/recon/outputs/r.npy"}``;
        a step alone means all of its outputs; ``()`` means nothing. Where it is not stated, the stage depends on
        every upstream run.

    Raises
    ------
    DeclarationError
        A name is no name, or `fn` is no function, or a coroutine or generator function.
    """

    name: str
    fn: Callable[[RunContext], Any]
    inputs: tuple[str, ...]
    config_keys: tuple[str, ...]
    version: object
    upstream: Mapping[str, tuple[str, ...]] | None

    def __init__(
        self,
        name: str,
        fn: Callable[[RunContext], Any],
        inputs: str | Iterable[str] = (),
        config_keys: str | Iterable[str] = (),
        *,
        version: object = None,
        upstream: Mapping[str, str | Iterable[str]] | Iterable[str] | None = None,
    ) -> None:
        if not callable(fn):
            raise DeclarationError(f"stage {name!r}: fn is a function of the context, not {fn!r}")
        if any(test(fn) for test in _LATER):
            raise DeclarationError(
                f"stage {name!r}: calling {fn!r} runs nothing, because it is a coroutine or generator function; give "
                "one that does the work before it returns: lambda ctx: asyncio.run(fn(ctx))"
            )
        declared: dict[str, tuple[str, ...]] | None = None
        if isinstance(upstream, Mapping):
            declared = {step: names(paths, "path") for step, paths in upstream.items()}
        elif upstream is not None:
            declared = dict.fromkeys(names(upstream, "step"), ())
        for key, value in {
            "name": check_name(name, "stage"),
            "fn": fn,
            "inputs": names(inputs, "stage"),
            "config_keys": names(config_keys, "config key"),
            "version": version,
            "upstream": declared,
        }.items():
            object.__setattr__(self, key, value)

    def code(self) -> StageCode:
        """Return what the stage's code comes to at this moment."""
        return stage_code(self.fn, self.version, self.name)

    def declaration(self, code: StageCode) -> dict[str, Any]:
        """Return the stage as plain JSON data: what the fingerprint of a run holds of it."""
        upstream = None if self.upstream is None else {step: list(paths) for step, paths in self.upstream.items()}
        return {
            "name": self.name,
            "code": code.code,
            "bound": code.bound,
            "inputs": list(self.inputs),
            "config_keys": list(self.config_keys),
            "upstream": upstream,
        }


def stages_text(stages: Iterable[Mapping[str, Any]]) -> str:
    """Return the text that stands for stages in the fingerprint of a run."""
    names_ = ("name", "code", "bound", "inputs", "config_keys", "upstream")
    return encoding.plain_text([{name: stage.get(name) for name in names_} for stage in stages])


def run_fingerprint(variant: str, stages: Iterable[Mapping[str, Any]] | str, upstream: Mapping[str, str]) -> str:
    """Return the fingerprint of a run: of the variant's, the stages as `Stage.declaration` has them, and the upstream.

    Manifests hold the same data, so that what is expected can be told without importing anything. The stages may be
    given as `stages_text` too.
    """
    told = stages if isinstance(stages, str) else stages_text(stages)
    above = encoding.plain_text(dict(upstream))
    return encoding.sha256_of([f'{{"stages":{told},"upstream":{above},"variant":"{variant}"}}'])
