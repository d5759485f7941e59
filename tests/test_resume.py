"""A job that is killed or interrupted loses at most its batches in flight, and resumes bit-equal."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time

import dask
import numpy as np
import pytest

from diffract_dask import Session

FIELDS = ("stable_rank", "weights_kurtosis", "weights_svals", "log_norm")

ADD_AND_APPLY = """
import sys, time
import numpy as np, dask
from diffract_dask import Session

dask.config.set({"diffract_dask.batch-seconds": 0.001, "diffract_dask.view-interval": 0.05})
session = Session(sys.argv[1])
print("ready", flush=True)
session.compute.apply("stable_rank", "weights_kurtosis", "weights_svals", "log_norm")
print("done", flush=True)
"""


def fill(path, n_models=6):
    session = Session(str(path))
    rng = np.random.default_rng(3)
    for m in range(n_models):
        arrays = {f"l{i}.weight": rng.standard_normal((90 + m, 60)).astype(np.float32) for i in range(8)}
        session.models.add(arrays, f"m{m}", step=m)
    return session


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    session = fill(tmp_path_factory.mktemp("whole") / "s.zarr")
    session.compute.apply(*FIELDS)
    return session.results.dataset(*FIELDS)


def killed_run(path, delay, how=signal.SIGKILL):
    command = [sys.executable, "-c", ADD_AND_APPLY, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(delay)
        process.send_signal(how)
        return "done" in process.stdout.read()


def check(path, expected):
    """The store opens, shows no wrong value, and apply finishes the rest, bit-equal."""
    session = Session(str(path))
    partial = session.results.dataset()
    for field in partial.data_vars:
        if field in expected and partial[field].dims == ("model_id", "name"):
            shown = partial[field].values
            wanted = expected[field].sel(model_id=partial.model_id, name=partial.name).values
            assert np.array_equal(shown[~np.isnan(shown)], wanted[~np.isnan(shown)])
    summary = session.compute.apply(*FIELDS)
    found = session.results.dataset(*FIELDS)
    for field in FIELDS:
        np.testing.assert_array_equal(found[field], expected[field])
    return summary


def test_sigkill_and_resume(tmp_path, expected):
    fill(tmp_path / "s.zarr")
    resumed = 0
    for delay in (0.02, 0.1, 0.25):
        finished = killed_run(tmp_path / "s.zarr", delay)
        resumed += not finished
    summary = check(tmp_path / "s.zarr", expected)
    assert resumed
    assert summary.reused.get("stable_rank", 0) + summary.computed.get("stable_rank", 0) == 48


@pytest.mark.slow
def test_sigkill_at_50_random_moments(tmp_path, expected):
    chance = random.Random(7)
    for i in range(50):
        path = tmp_path / f"s{i}.zarr"
        fill(path)
        killed_run(path, chance.uniform(0, 0.6))
        check(path, expected)


def test_interrupt_keeps_what_was_committed(tmp_path, expected):
    fill(tmp_path / "s.zarr")
    killed_run(tmp_path / "s.zarr", 0.2, signal.SIGINT)
    check(tmp_path / "s.zarr", expected)


def test_batches_do_not_change_numbers(tmp_path, expected):
    session = fill(tmp_path / "s.zarr")
    with dask.config.set({"diffract_dask.batch-seconds": 1e-6, "diffract_dask.threads": 1}):
        for model in session.models.list():
            session.filter(model_ids=model).compute.apply("stable_rank")
        session.compute.apply(*FIELDS)
    found = session.results.dataset(*FIELDS)
    for field in FIELDS:
        np.testing.assert_array_equal(found[field], expected[field])
