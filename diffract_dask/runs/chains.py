"""Chains: pipelines that read one another's runs; and variations: one variant for each of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from diffract_dask.errors import DeclarationError, UnknownNameError, did_you_mean
from diffract_dask.runs import leases, manifests
from diffract_dask.runs.code import file_of
from diffract_dask.runs.listing import RunRegistry
from diffract_dask.runs.naming import check_kind, check_known, check_name, names
from diffract_dask.runs.pipelines import Pipeline
from diffract_dask.runs.records import RunRecord
from diffract_dask.runs.variants import Variant, owner, registry

__all__ = ["Chain", "ChainStep", "Variation", "resolved"]


@dataclass(frozen=True, init=False)
class ChainStep:
    """A pipeline as a step of a chain.

    Parameters
    ----------
    name : str
    pipeline : Pipeline
    consumes : str or iterable of str
        Earlier steps whose runs it reads.
    """

    name: str
    pipeline: Pipeline
    consumes: tuple[str, ...]

    def __init__(self, name: str, pipeline: Pipeline, consumes: str | Iterable[str] = ()) -> None:
        if not isinstance(pipeline, Pipeline):
            raise DeclarationError(f"step {name!r} is a Pipeline, not {pipeline!r}")
        object.__setattr__(self, "name", check_name(name, "step"))
        object.__setattr__(self, "pipeline", pipeline)
        object.__setattr__(self, "consumes", names(consumes, "step"))


class _Variations(dict[str, "Variation"]):
    """Variations by name; one that does not exist is said with the nearest names."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def __missing__(self, name: str) -> NoReturn:
        check_known([name], self, "variation", self.where)
        raise AssertionError  # what is missing is not known


class Chain:
    """Pipelines in order, with what each reads of the others.

    Parameters
    ----------
    name : str
    steps : iterable of ChainStep
    parent : str
        The name of the chain that this one is forked from.
    module : str
        By default the module that makes it.

    Raises
    ------
    DeclarationError
        Two steps have one name, or a consumed step does not come earlier.
    """

    def __init__(
        self, name: str, steps: Iterable[ChainStep], *, parent: str | None = None, module: str | None = None
    ) -> None:
        frame = sys._getframe(1)
        self.name = check_name(name, "chain")
        self.steps = tuple(steps)
        self.parent = parent
        self.module = module or owner(frame)
        here = self.module == owner(frame)
        self.source_file: str | None = frame.f_globals.get("__file__") if here else file_of(self.module)
        self.variations: dict[str, Variation] = _Variations(f"chain {name!r}")
        seen: list[str] = []
        for step in self.steps:
            if not isinstance(step, ChainStep):
                raise DeclarationError(
                    f"chain {name!r} has {step!r} among its steps; wrap it: ChainStep(name, pipeline)"
                )
            if step.name in seen:
                raise DeclarationError(f"chain {name!r} has two steps {step.name!r}")
            for needed in step.consumes:
                if needed not in seen:
                    raise DeclarationError(
                        f"step {step.name!r} of chain {name!r} consumes {needed!r}, which is no earlier step."
                        f"{did_you_mean(needed, seen)}"
                    )
            if step.pipeline.name in [
                other.pipeline.name for other in self.steps if other.pipeline is not step.pipeline
            ]:
                raise DeclarationError(f"chain {name!r} has two pipelines called {step.pipeline.name!r}")
            seen.append(step.name)
        if not self.steps:
            raise DeclarationError(f"chain {name!r} has no steps")
        registry.note(self)

    def __repr__(self) -> str:
        return f"Chain({self.name!r}, {self.step_names})"

    @property
    def step_names(self) -> list[str]:
        """The names of the steps, in order."""
        return [step.name for step in self.steps]

    def variation(
        self,
        name: str,
        /,
        mapping: Mapping[str, str] | None = None,
        *,
        base: str | None = None,
        forks_of: str | None = None,
        **steps: str,
    ) -> Variation:
        """Declare a variation: a variant for each step, by name; what it leaves out comes from its base.

        Parameters
        ----------
        name : str
        mapping : mapping
            Variants by step: for steps whose names are no identifiers.
        base : str
            A variation of this chain, which may be declared later.
        forks_of : str
            The variation of the parent chain that this one descends from under another name.
        **steps : str

        Raises
        ------
        UnknownNameError
            The chain has no such step, or the step's pipeline no such variant.
        DeclarationError
            The chain has a variation of this name.
        """
        check_name(name, "variation")
        chosen = {**(mapping or {}), **steps}
        for step_name, variant in chosen.items():
            check_name(variant, f"variant for step {step_name!r}")
        where = f"chain {self.name!r}"
        check_known(chosen, self.step_names, "step", where)
        for step in self.steps:
            if step.name in chosen:
                step.pipeline.variant(chosen[step.name])
        if name in self.variations and self.variations[name].as_written != (base, forks_of, chosen):
            raise DeclarationError(f"{where} has a variation {name!r} already, with other variants")
        made = Variation(self, name, base, forks_of, chosen)
        self.variations[name] = made
        registry.count += 1
        return made


@dataclass(frozen=True, eq=False)
class Variation:
    """One variant for each step of a chain.

    Attributes
    ----------
    chain : Chain
    name : str
    base, forks_of : str or None
    overrides : dict
        Variants by step, as this variation names them.
    """

    chain: Chain
    name: str
    base: str | None
    forks_of: str | None
    overrides: Mapping[str, str]

    @property
    def as_written(self) -> tuple[str | None, str | None, Mapping[str, str]]:
        """Base, fork and overrides."""
        return self.base, self.forks_of, self.overrides

    def resolve(self) -> dict[str, str]:
        """Return the variant of every step, those of the bases included.

        Raises
        ------
        UnknownNameError
            A base does not exist, or a step has no variant.
        DeclarationError
            Bases build on one another in a circle.
        """
        table = {name: (other.base, other.overrides) for name, other in self.chain.variations.items()}
        mapping = resolved(self.chain.name, self.name, table)
        left = [step for step in self.chain.step_names if step not in mapping]
        if left:
            raise UnknownNameError(
                f"variation {self.name!r} of chain {self.chain.name!r} names no variant for step {left[0]!r}; "
                f"give one: {left[0]}='…'"
            )
        return {step: mapping[step] for step in self.chain.step_names}

    def variants(self) -> dict[str, Variant]:
        """Return the variant of every step.

        Raises
        ------
        UnknownNameError, DeclarationError
            As `resolve`.
        """
        mapping = self.resolve()
        return {step.name: step.pipeline.variant(mapping[step.name]) for step in self.chain.steps}

    def run(
        self, registry: RunRegistry, *, force: Mapping[str, str | Iterable[str]] | None = None
    ) -> dict[str, RunRecord]:
        """Run every step that is not done, in order, in this process; return the records by step.

        Parameters
        ----------
        registry : RunRegistry
        force : mapping
            Stages to run though they are done, by step.

        Raises
        ------
        UnknownNameError, DeclarationError
            The variation does not name a variant for every step, or a name is wrong; nothing has run.
        """
        check_kind(registry, RunRegistry, "the registry of a run")
        check_kind(force or {}, Mapping, "force= of a variation, stages by step,")
        variants = self.variants()
        check_known(force or {}, self.chain.step_names, "step", f"chain {self.chain.name!r}")
        for step in self.chain.steps:
            step.pipeline.check_keys(variants[step.name])
            stages = names((force or {}).get(step.name), "stage")
            check_known(stages, step.pipeline.stage_names, "stage", f"pipeline {step.pipeline.name!r}")
            for stage in step.pipeline.stages:
                check_known(stage.upstream or (), step.consumes, "consumed step", f"step {step.name!r}")
        for module in dict.fromkeys([self.chain.module, *(step.pipeline.module for step in self.chain.steps)]):
            with leases.writing(registry.root):
                manifests.write(registry.root, module)
        records: dict[str, RunRecord] = {}
        for step in self.chain.steps:
            records[step.name] = step.pipeline.run(
                variants[step.name],
                registry,
                force=(force or {}).get(step.name),
                upstream={name: records[name] for name in step.consumes},
                chain=self.chain.name,
                variation=self.name,
                step=step.name,
            )
        return records


def resolved(chain: str, name: str, variations: Mapping[str, tuple[str | None, Mapping[str, str]]]) -> dict[str, str]:
    """Return the variants by step of a variation, given base and overrides of every one by name.

    Raises
    ------
    UnknownNameError
        A base does not exist.
    DeclarationError
        Bases build on one another in a circle.
    """
    line: list[str] = []
    at: str | None = name
    while at is not None:
        if at in line:
            circle = " → ".join([*line[line.index(at) :], at])
            raise DeclarationError(f"variations of chain {chain!r} build on one another in a circle: {circle}")
        if at not in variations:
            below = f" to build {line[-1]!r} on" if line else ""
            raise UnknownNameError(f"chain {chain!r} has no variation {at!r}{below}.{did_you_mean(at, variations)}")
        line.append(at)
        at = variations[at][0]
    mapping: dict[str, str] = {}
    for each in reversed(line):
        mapping.update(variations[each][1])
    return mapping
