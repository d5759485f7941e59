"""Options that several commands share, and the session that they ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from diffract_dask.errors import ConfigurationError

if TYPE_CHECKING:
    from diffract_dask.session import Session

__all__ = [
    "Files",
    "Output",
    "compute_options",
    "fields_argument",
    "file_options",
    "format_option",
    "gathered",
    "open_session",
    "output_options",
    "refuse_unreadable",
    "scope_options",
    "store_options",
]

Command = Callable[..., Any]


class Files(NamedTuple):
    """Checkpoints to add, and how."""

    paths: tuple[Path, ...]
    model_id: str | None
    step: str | None
    parent: str | None
    replace: bool

    def default_id(self, path: Path) -> str:
        """Return the model id for a file: as given, else its stem, or its folder's name where the stem says nothing."""
        if self.model_id is not None:
            return self.model_id
        path = path.resolve()
        stem = path.name.removesuffix(".index.json")
        stem = stem if path.is_dir() else stem.removesuffix(Path(stem).suffix)
        return path.parent.name if stem in _SAYS_NOTHING and path.parent.name else stem

    def step_of(self, path: Path) -> float | None:
        """Return the training step: as given, or the last number in the name of the file or else of its folder."""
        if self.step is None:
            return None
        numbers = re.findall(r"\d+", path.stem) or re.findall(r"\d+", path.resolve().parent.name)
        text = self.step if self.step != "auto" else numbers[-1] if numbers else ""
        try:
            return float(text)
        except ValueError:
            wrong = f"there is no number in {path}" if self.step == "auto" else f"{self.step!r} is not a number"
            raise click.ClickException(f"--step: {wrong}; give a number, or 'auto' to read it from the path") from None


_SAYS_NOTHING = frozenset({"model", "pytorch_model", "weights", "checkpoint", "adapter_model", "state_dict"})


class Output(NamedTuple):
    """How to print rows."""

    format: str = "table"
    sort: str | None = None
    conditions: tuple[str, ...] = ()


def gathered(command: Command, name: str, gather: Command, *options: Callable[[Command], Command]) -> Command:
    """Return a command with more options, whose values it gets as one argument: ``gather(**values)``."""
    own = [parameter.name for option in options for parameter in _declared(option)]

    @wraps(command)
    def with_options(*args: Any, **values: Any) -> Any:
        return command(*args, **{name: gather(**{key: values.pop(key) for key in own})}, **values)

    for option in reversed(options):
        option(with_options)
    return with_options


def _declared(option: Callable[[Command], Command]) -> list[click.Parameter]:
    probe: Any = option(lambda: None)
    declared: list[click.Parameter] = probe.__click_params__
    return declared


def store_options(command: Command) -> Command:
    """``--store`` and ``--config``, before or after the name of the command."""

    def remember(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
        if value is not None:
            ctx.ensure_object(dict)[parameter.name] = value

    for option, metavar, text in (
        ("--config", "FILE", "Settings in YAML or JSON; see configs/."),
        ("--store", "PATH", "Where results are kept. Default: the setting 'store', ./diffract.zarr."),
    ):
        command = click.option(option, metavar=metavar, callback=remember, expose_value=False, help=text)(command)
    return command


def scope_options(command: Command) -> Command:
    def gather(**patterns: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        return {axis: given for axis, given in patterns.items() if given}

    def option(name: str, axis: str, text: str) -> Callable[[Command], Command]:
        return click.option(name, axis, multiple=True, metavar="PATTERN", help=f"{text} Repeatable.")

    return gathered(
        command,
        "scope",
        gather,
        option("--model", "model_ids", "Only this model: exact, a glob, or re:REGEX."),
        option("--name", "param_names", "Only parameters of this name: exact, a glob, or re:REGEX."),
        option("--type", "param_types", "Only parameters of this type (dense, conv, embedding, …)."),
    )


format_option = click.option(
    "--format",
    type=click.Choice(["table", "csv", "json"]),
    default="table",
    show_default=True,
    help="What to print.",
)


def output_options(command: Command) -> Command:
    return gathered(
        command,
        "output",
        Output,
        click.option(
            "--filter",
            "conditions",
            multiple=True,
            metavar="CONDITION",
            help="Only rows where it holds: 'stable_rank>5', 'type==conv', 'name~attn'. Repeatable: all must hold.",
        ),
        click.option(
            "--sort", metavar="COLUMN", help="Order of the rows; -COLUMN is the largest first, nan always last."
        ),
        format_option,
    )


def file_options(command: Command) -> Command:
    def gather(paths: tuple[Path, ...], **options: Any) -> Files:
        if options["model_id"] is not None and len(paths) > 1:
            raise click.UsageError(f"--id names one model, and {len(paths)} files were given; leave it out.")
        return Files(paths, **options)

    return gathered(
        command,
        "files",
        gather,
        click.argument(
            "paths", metavar="FILE...", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path)
        ),
        click.option("--id", "model_id", metavar="ID", help="Name of the model. Default: after the file."),
        click.option("--step", metavar="N", help="Training step; 'auto' is the last number in each file's name."),
        click.option("--parent", metavar="ID", help="Model that this one came from."),
        click.option("--replace", is_flag=True, help="Replace a model of this id; values that still hold are kept."),
    )


def refuse_unreadable(paths: Sequence[Path]) -> None:
    """UnsupportedSourceError for a file of a kind that no source reads, before a store is made for it."""
    from diffract_dask.sources import source_of

    for path in paths:
        source_of(path)


def compute_options(command: Command) -> Command:
    def gather(params: tuple[str, ...]) -> dict[str, dict[str, Any]] | None:
        return _kernel_params(params) or None

    option = click.option(
        "--param", "params", multiple=True, metavar="KERNEL.NAME=VALUE", help="Parameter of a kernel. Repeatable."
    )
    command = gathered(scope_options(command), "params", gather, option)
    return click.argument("fields", nargs=-1, required=True, metavar="FIELD...")(command)


fields_argument = click.argument("fields", nargs=-1, metavar="[FIELD]...")


def _kernel_params(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return ``{"hard_rank": {"rtol": 1e-9}}`` from ``hard_rank.rtol=1e-9``."""
    params: dict[str, dict[str, Any]] = {}
    for text in texts:
        parsed = re.fullmatch(r"([^.=]+)\.([^.=]+)=(.*)", text)
        if parsed is None:
            raise ConfigurationError(f"--param {text!r}: write KERNEL.NAME=VALUE, for example hard_rank.rtol=1e-9")
        kernel, name, value = parsed.groups()
        try:
            params.setdefault(kernel, {})[name] = json.loads(value)
        except ValueError:
            params.setdefault(kernel, {})[name] = value
    return params


def _location() -> str:
    """Return the store that was asked for: the option, else the setting."""
    from diffract_dask import config

    given: dict[str, str] = click.get_current_context().ensure_object(dict)
    settings = config.load(given["config"]) if "config" in given else None
    return given.get("store") or str(config.get("store", settings))


def open_session(scope: Mapping[str, Sequence[str]] | None = None, *, mode: str = "r") -> Session:
    """Open the store, narrowed to `scope`. Commands that only read refuse to make one."""
    location = _location()
    if mode == "r" and "://" not in location and not Path(location).exists():
        raise click.ClickException(
            f"there is no store at {location}; make one with 'diffract-dask analyze FILE', or name another with --store"
        )
    from diffract_dask.errors import did_you_mean
    from diffract_dask.selection import is_pattern
    from diffract_dask.session import Session

    session = Session(location, config_path=click.get_current_context().ensure_object(dict).get("config"), mode=mode)
    for pattern in (scope or {}).get("model_ids") or ():
        known = session.models.list()
        if pattern not in known and not is_pattern(pattern):
            raise click.ClickException(f"no model {pattern!r} in {location}.{did_you_mean(pattern, known)}")
    return session.filter(**scope) if scope else session
