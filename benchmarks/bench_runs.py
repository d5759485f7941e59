"""Many runs: listing them, and the scoreboard of a chain of many variations."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from diffract_dask.runs import Catalog, RunRecord, RunRegistry, encoding, manifests, scoreboard
from diffract_dask.runs.naming import folder
from diffract_dask.runs.stages import run_fingerprint

STAGES = [
    {"name": name, "code": "0" * 64, "bound": None, "inputs": [], "config_keys": [], "upstream": None}
    for name in ("prepare", "work", "judge")
]


def write_chain(root: Path, variations: int) -> None:
    """Write the manifest and the runs of a chain of two pipelines: two runs for each variation."""
    variants = [
        {
            "name": f"v{i}",
            "base": None,
            "base_module": None,
            "forks_of": None,
            "overrides": {},
            "config": {"amp": i},
            "fingerprint": encoding.fingerprint({"amp": i}),
        }
        for i in range(variations)
    ]
    steps = [
        {"name": "first", "pipeline": "first", "module": "chain", "consumes": []},
        {"name": "second", "pipeline": "second", "module": "chain", "consumes": ["first"]},
    ]
    told = [
        {"name": f"v{i}", "base": None, "forks_of": None, "overrides": {"first": f"v{i}", "second": f"v{i}"}}
        for i in range(variations)
    ]
    (root / manifests.MANIFESTS).mkdir(parents=True)
    encoding.write_json(
        root / manifests.MANIFESTS / "chain.json",
        {
            "module": "chain",
            "pipelines": [{"name": step["name"], "parent": None, "stages": STAGES} for step in steps],
            "variants": variants,
            "chains": [{"name": "chain", "parent": None, "steps": steps, "variations": told}],
        },
    )
    for variant in variants:
        above: dict[str, str] = {}
        for step in steps:
            above = {"first": write_run(root, str(step["name"]), variant, above)} if step["name"] == "first" else above
            if step["name"] == "second":
                write_run(root, "second", variant, above)


def write_run(root: Path, pipeline: str, variant: dict[str, object], upstream: dict[str, str]) -> str:
    """Write one run as `Pipeline.run` would leave it, and return its fingerprint."""
    names = [str(stage["name"]) for stage in STAGES]
    fingerprint = run_fingerprint(str(variant["fingerprint"]), STAGES, upstream)
    record = RunRecord(
        pipeline,
        str(variant["name"]),
        fingerprint,
        variant_fingerprint=str(variant["fingerprint"]),
        started="2026-01-01T00:00:00.000+00:00",
        ended="2026-01-01T00:00:01.000+00:00",
        stages=names,
        stage_keys=dict.fromkeys(names, "0" * 64),
        stage_status=dict.fromkeys(names, "done"),
        code=dict.fromkeys(names, "0" * 64),
        metrics={"judge": {f"m{i}": {"value": i / 7, "units": None, "direction": None} for i in range(3)}},
        computed_by={
            name: {"run": "x", "fingerprint": fingerprint, "invocation": "20260101T000000-00000000", "pid": 1}
            for name in names
        },
        chain="chain",
        variation=str(variant["name"]),
        memberships=[{"chain": "chain", "variation": str(variant["name"]), "step": pipeline}],
        upstream=upstream,
        sources={"chain": "chain.py"},
        host="host",
        pid=1,
        command=["python", "run.py"],
        versions={"numpy": "2.0"},
    )
    path = root / folder(pipeline) / folder(record.variant) / record.short_fp
    path.mkdir(parents=True)
    encoding.write_json(path / "run.json", record.as_dict())
    return fingerprint


class _Runs:
    params: tuple[list[int]] = ([],)
    tiny: tuple[list[int]] = ([],)

    def setup(self, variations: int) -> None:
        self.root = Path(tempfile.mkdtemp())
        write_chain(self.root, variations)
        self.registry = RunRegistry(self.root)
        self.registry.list_runs()

    def teardown(self, variations: int) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


class Listing(_Runs):
    """Two runs for each variation."""

    params = ([500, 5000],)
    tiny = ([3],)
    param_names = ("variations",)

    def time_cold(self, variations: int) -> None:
        RunRegistry(self.root).list_runs()

    def time_warm(self, variations: int) -> None:
        self.registry.list_runs()


class Scores(_Runs):
    """The scoreboard of a chain of two steps, manifests and runs read anew, and with the runs read before."""

    params = ([100, 1000],)
    tiny = ([3],)
    param_names = ("variations",)

    def time_cold(self, variations: int) -> None:
        scoreboard(Catalog(self.root, live=False), "chain", "v0")

    def time_warm(self, variations: int) -> None:
        scoreboard(Catalog(self.registry, live=False), "chain", "v0")
