"""The fork forest of pipelines and of chains."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from diffract_dask.runs.catalog import Catalog, ChainInfo, ModuleError, PipelineInfo

__all__ = ["Forest", "Node", "forest"]


@dataclass
class Node:
    """A pipeline or chain in the forest.

    Attributes
    ----------
    name, module : str
    parent : str or None
    orphan : bool
        Its parent is not known.
    cycle : bool
        It is forked, over others, from itself.
    count : int
        Variants of a pipeline, variations of a chain.
    members : list of str
        Stages of a pipeline, steps of a chain.
    runs : int
    outdated : bool
        Its source is newer than what is known of it.
    error : str or None
        Why its module could not be read or imported.
    children : list of Node
    """

    name: str
    module: str
    parent: str | None
    orphan: bool = False
    cycle: bool = False
    count: int = 0
    members: list[str] = field(default_factory=list)
    runs: int = 0
    outdated: bool = False
    error: str | None = None
    children: list[Node] = field(default_factory=list)


@dataclass
class Forest:
    """Roots of the fork forests, in order of name; orphans and the members of circles are roots too."""

    pipelines: list[Node]
    chains: list[Node]
    errors: list[ModuleError]


def forest(catalog: Catalog) -> Forest:
    """Return which pipeline and which chain is forked from which, with orphans and circles marked.

    Pipelines that have runs and that no manifest describes are listed too.
    """
    counts: dict[str, int] = {}
    parents: dict[str, str | None] = {}
    chain_counts: dict[str, int] = {}
    for record in catalog.runs.list_runs():
        counts[record.pipeline] = counts.get(record.pipeline, 0) + 1
        parents.setdefault(record.pipeline, record.parent)
        for at in record.memberships:
            if at.get("chain"):
                chain_counts[str(at["chain"])] = chain_counts.get(str(at["chain"]), 0) + 1
    pipelines = [_pipeline(item, counts) for item in catalog.pipelines.values()]
    known = {node.name for node in pipelines}
    pipelines += [Node(name, "", parents[name], runs=n) for name, n in counts.items() if name not in known]
    chains = [_chain(item, chain_counts) for item in catalog.chains.values()]
    return Forest(_grown(pipelines), _grown(chains), list(catalog.errors))


def _pipeline(item: PipelineInfo, counts: dict[str, int]) -> Node:
    stages = [str(stage["name"]) for stage in item.stages]
    runs = counts.get(item.name, 0)
    return Node(
        item.name,
        item.module,
        item.parent,
        count=len(item.variants),
        members=stages,
        runs=runs,
        outdated=item.outdated,
        error=item.error,
    )


def _chain(item: ChainInfo, counts: dict[str, int]) -> Node:
    steps = [step.name for step in item.steps]
    runs = counts.get(item.name, 0)
    return Node(
        item.name,
        item.module,
        item.parent,
        count=len(item.variations),
        members=steps,
        runs=runs,
        outdated=item.outdated,
        error=item.error,
    )


def _grown(nodes: Iterable[Node]) -> list[Node]:
    """Hang every node below its parent, and return the roots."""
    table = {node.name: node for node in sorted(nodes, key=lambda node: node.name)}
    roots = []
    for node in table.values():
        node.orphan = node.parent is not None and node.parent not in table
        node.cycle = _in_circle(node, table)
        if node.parent is None or node.orphan or node.cycle:
            roots.append(node)
        else:
            table[node.parent].children.append(node)
    return roots


def _in_circle(node: Node, table: dict[str, Node]) -> bool:
    seen: set[str] = set()
    at = node.parent
    while at is not None and at in table and at not in seen:
        if at == node.name:
            return True
        seen.add(at)
        at = table[at].parent
    return False
