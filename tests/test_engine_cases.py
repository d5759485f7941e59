"""Cases that broke the engine once: staleness, failures, changes meanwhile, odd kernels, requests and settings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

import dask
import numpy as np
import pytest
from dask.callbacks import Callback

from diffract_dask import Session, errors, graph
from diffract_dask.fields import Field
from diffract_dask.kernel import kernel
from diffract_dask.testing import write_safetensors


def weights(seed=0, n=3, shape=(12, 8), dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {f"h.{i}.w.weight": rng.standard_normal(shape).astype(dtype) for i in range(n)}


@pytest.fixture
def session():
    made = Session()
    made.models.add(weights(), "m")
    return made


def shown(session: Session, *fields: str) -> Any:
    """Return the values of fields, whatever state they are in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.StaleValuesWarning)
        dataset = session.results.dataset(*fields)
    found = [dataset[field].values for field in fields]
    return found if len(found) > 1 else found[0]


def fresh(model: Any, *fields: str) -> Any:
    other = Session()
    other.models.add(model, "m")
    other.compute.apply(*fields)
    return shown(other, *fields)


def states(session: Session, field: str) -> list[str]:
    return session.results.status(field).state.values.ravel().tolist()


class Tasks(Callback):
    """The layers of the tasks that ran."""

    def __init__(self) -> None:
        self.layers: list[str] = []

    def _pretask(self, key, dsk, state):
        self.layers.append(key[0].rsplit("-", 1)[0] if isinstance(key, tuple) else str(key))


class Flaky:
    """A kernel that raises until it is told not to."""

    def __init__(self) -> None:
        self.raises = True

    def register(self, session: Session, **outputs: Field) -> None:
        @session.compute.kernel(name="flaky", version=1, **outputs)
        def flaky(frob_norm):
            if self.raises:
                raise RuntimeError("not now")
            return frob_norm


# What is stale, and what is not


def test_an_output_that_is_not_written_loses_the_value_of_another_key(tmp_path):
    path = tmp_path / "m.safetensors"
    write_safetensors(path, weights(0))
    session = Session(str(tmp_path / "s.zarr"))
    session.models.add(path, "m", link=True)
    session.compute.apply("weights_lsvs")
    write_safetensors(path, weights(1))
    os.utime(path, ns=(1, 1))
    session.compute.apply("weights_rsvs")
    assert states(session, "weights_lsvs") == ["missing"] * 3
    assert session.compute.apply("weights_lsvs").computed == {"weights_lsvs": 3}
    np.testing.assert_array_equal(shown(session, "weights_lsvs"), fresh(weights(1), "weights_lsvs"))


def test_an_output_keeps_its_value_when_another_one_is_asked_for(session):
    session.compute.apply("weights_lsvs")
    session.compute.apply("weights_rsvs")
    assert session.compute.apply("weights_lsvs", "weights_rsvs").kernel_slices == {}
    np.testing.assert_array_equal(shown(session, "weights_lsvs"), fresh(weights(), "weights_lsvs"))


def test_an_erased_output_does_not_make_the_others_stale(session):
    session.compute.apply("frob_norm")
    session.results.erase("weights_mean")
    assert session.compute.plan("frob_norm").nothing_to_do
    assert states(session, "frob_norm") == ["fresh"] * 3
    session.results.dataset("frob_norm", "weights_mean")  # no warning of stale values
    assert "missing 3" in session.compute.plan("weights_mean").explain()
    assert session.compute.apply("weights_mean").computed["weights_mean"] == 3


def test_swapped_outputs_are_another_kernel(session):
    def declare(names):
        @session.compute.kernel(name="both", produce_fields=names)
        def both(frob_norm):
            return frob_norm, -frob_norm

    declare(["one", "other"])
    session.compute.apply("one", "other")
    declare(["other", "one"])
    session.compute.apply("one", "other")
    assert (shown(session, "one") < 0).all()
    assert (shown(session, "other") > 0).all()


@pytest.mark.parametrize("first", [Field("K"), Field("K", dims=("sval",))])
def test_a_field_that_becomes_an_array_or_a_number(session, first):
    session.models.add(weights(1), "n")

    def declare(declared):
        if declared.dims:
            session.compute.kernel(name="k", k=declared)(lambda weights_svals: weights_svals * 2)
        else:
            session.compute.kernel(name="k", k=declared)(lambda weights_svals: weights_svals.sum())

    second = Field("K", dims=() if first.dims else ("sval",))
    declare(first)
    session.compute.apply("k")
    declare(second)
    assert shown(session, "k").ndim == 2 + len(second.dims)
    session.filter(model_ids="m").compute.apply("k")
    assert shown(session, "k").ndim == 2 + len(second.dims)
    assert session.compute.apply("k").computed == {"k": 3}
    assert np.isfinite(shown(session, "k")).all()


def test_a_variant_follows_its_kernel(session):
    def declare(plus):
        session.compute.kernel(name="k")(eval(f"lambda frob_norm, *, a=1, b=0: frob_norm * a + b + {plus}"))

    declare(0)
    session.compute.configure_kernel("k", b=5)
    session.compute.variant("k", "k2", a=2)
    session.compute.variant("k", "k2", a=3)  # as a notebook does it
    assert session.compute.registry.params("k2") == {"a": 3, "b": 5}
    session.compute.apply("k2")
    declare(1)
    session.compute.apply("k2")
    np.testing.assert_allclose(shown(session, "k2"), fresh(weights(), "frob_norm") * 3 + 6)
    with pytest.raises(errors.KernelRegistrationError, match="cannot replace"):
        session.compute.kernel(name="k")(lambda frob_norm: frob_norm)
    assert session.compute.registry.params("k2") == {"a": 3, "b": 5}


def test_a_redefined_kernel_forgets_parameters_it_no_longer_has(session):
    session.compute.kernel(name="k")(lambda frob_norm, *, a=1: frob_norm * a)
    session.compute.configure_kernel("k", a=2)
    session.compute.kernel(name="k")(lambda frob_norm: frob_norm)
    assert session.compute.apply("k").computed["k"] == 3


def test_a_cached_helper_is_part_of_the_code():
    def version(body):
        scope = {"__name__": "user"}
        exec(
            f"import functools\n@functools.cache\ndef g(x):\n return {body}\ndef f(frob_norm):\n return g(frob_norm)",
            scope,
        )
        return kernel(scope["f"]).__kernel__.version

    assert version("x") != version("-x")
    assert version("x") == version("x")


# Failures and what depends on them


def test_a_retried_failure_makes_what_depends_on_it_stale(session):
    flaky = Flaky()
    flaky.register(session)
    session.compute.kernel(name="after", version=1)(lambda flaky: flaky + 1)
    session.compute.kernel(name="total", version=1, level="model")(lambda flaky: float(np.nansum(flaky)))
    session.compute.kernel(name="twice", version=1, level="model")(lambda total: total * 2)
    assert len(session.compute.apply("flaky", "after", "twice").failed) == 3
    assert session.compute.apply("flaky", "after", "twice").kernel_slices == {}
    flaky.raises = False
    session.compute.apply("flaky", retry_failed=True)
    assert states(session, "after") == ["stale"] * 3
    assert states(session, "twice") == ["stale"] * 3
    summary = session.compute.apply("after", "twice")
    assert summary.failed == ()
    norms = fresh(weights(), "frob_norm")
    np.testing.assert_allclose(shown(session, "after"), norms + 1)
    np.testing.assert_allclose(shown(session, "twice"), [norms.sum() * 2])
    assert session.compute.plan("after", "twice").nothing_to_do


def test_a_retried_model_level_failure_makes_what_depends_on_it_stale(session):
    flaky = Flaky()

    @session.compute.kernel(name="total", version=1, level="model")
    def total(frob_norm):
        if flaky.raises:
            raise RuntimeError("not now")
        return float(frob_norm.sum())

    session.compute.kernel(name="twice", version=1, level="model")(lambda total: total * 2)
    (failure,) = session.compute.apply("twice").failed
    assert (failure.kernel, failure.name) == ("total", "")
    (again,) = session.compute.apply("twice").failed
    assert again.reason.endswith("(not retried)")
    flaky.raises = False
    session.compute.apply("total", retry_failed=True)
    session.compute.apply("twice")
    np.testing.assert_allclose(shown(session, "twice"), [fresh(weights(), "frob_norm").sum() * 2])


def test_a_retried_failure_that_stays_one_does_not_stop_model_level_values(session):
    flaky = Flaky()
    flaky.register(session)
    session.compute.kernel(name="total", version=1, level="model")(lambda flaky: float(np.isnan(flaky).sum()))
    session.compute.apply("flaky")
    summary = session.compute.apply("flaky", "total", retry_failed=True)
    assert summary.kernel_slices["flaky"] == len(summary.failed) == 3
    assert shown(session, "total").tolist() == [3.0]


def test_a_failure_of_a_kernel_that_is_not_stored_is_told(session):
    flaky = Flaky()
    flaky.register(session, passing=Field("P", persist=False))
    session.compute.kernel(name="after", version=1)(lambda passing: passing + 1)
    summary = session.compute.apply("after")
    assert {(f.kernel, f.reason) for f in summary.failed} == {("flaky", "RuntimeError: not now")}
    assert len(summary.failed) == 3
    assert session.results.status("after").reason.values.ravel().tolist() == ["RuntimeError: not now"] * 3
    assert len(session.compute.apply("after").failed) == 3
    flaky.raises = False
    assert session.compute.apply("after", retry_failed=True).failed == ()
    assert session.store.failures("m") == {}


def test_a_copied_failure_keeps_its_reason(session):
    Flaky().register(session)
    session.compute.apply("flaky")
    with pytest.warns(errors.DuplicateContentWarning):
        session.models.add(weights(), "copy")
    summary = session.compute.apply("flaky")
    assert summary.kernel_slices == {}
    assert {f.model_id for f in summary.failed} == {"m", "copy"}
    assert set(session.results.status("flaky").reason.values.ravel()) == {"RuntimeError: not now"}


# Kernels that do what they should not


@pytest.mark.parametrize("level", ["slice", "model"])
@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "return nan"),
        (1 + 2j, "real numbers"),
        (np.array(1 + 2j), "real numbers"),
        ("1.5", "real numbers"),
        (np.datetime64("2020-01-01"), "real numbers"),
        (np.array([1.0, None]), "real numbers"),
        (np.ones(2), "shape"),
        ({"another": 1.0}, "declared are"),
        ((1.0, 2.0), "returned 2 values"),
        (10**400, "OverflowError"),
    ],
)
def test_what_is_no_number_is_a_failure(session, level, returned, reason):
    session.compute.kernel(name="k", version=1, level=level)(lambda frob_norm: returned)
    summary = session.compute.apply("k", "stable_rank")
    assert {f.kernel for f in summary.failed} == {"k"}
    assert all(reason in f.reason for f in summary.failed)
    assert np.isnan(shown(session, "k")).all()
    assert np.isfinite(shown(session, "stable_rank")).all()


@pytest.mark.parametrize("level", ["slice", "model"])
@pytest.mark.parametrize("form", [tuple, list, dict])
def test_several_outputs_in_any_form(session, level, form):
    made = {"b": 2, "a": np.float32(1)} if form is dict else form([1, np.bool_(True)])
    session.compute.kernel(produce_fields=["a", "b"], name="k", version=1, level=level)(lambda frob_norm: made)
    assert session.compute.apply("a", "b").failed == ()
    assert (shown(session, "a") == 1).all()


@pytest.mark.parametrize("batch", [True, False])
def test_inputs_cannot_be_changed(session, batch):
    @session.compute.kernel(batch=batch, version=1)
    def careless(weights, weights_svals):
        weights_svals[:] = 0
        return weights_svals.sum(-1)

    @session.compute.kernel(batch=batch, version=1)
    def worse(weights):
        weights[:] = 0
        return weights.sum((-1, -2))

    summary = session.compute.apply("careless", "worse", "nuclear_norm", "frob_norm")
    assert len(summary.failed) == 6
    assert all("read-only" in f.reason for f in summary.failed)
    for field in ("nuclear_norm", "frob_norm"):
        np.testing.assert_array_equal(shown(session, field), fresh(weights(), field))


@pytest.mark.parametrize("level", ["slice", "model"])
def test_parameters_cannot_be_changed(session, level):
    @session.compute.kernel(name="k", version=1, level=level)
    def k(frob_norm, *, seen=[]):  # noqa: B006
        seen.append(1)
        return float(len(seen))

    session.compute.apply("k")
    assert (shown(session, "k") == 1).all()
    assert session.compute.plan("k").nothing_to_do


class Stop(BaseException):
    pass


@pytest.mark.parametrize("level", ["slice", "model"])
@pytest.mark.parametrize("kind", [Stop, SystemExit, GeneratorExit])
def test_a_kernel_that_raises_what_is_no_exception(session, kind, level):
    @session.compute.kernel(name="k", version=1, level=level)
    def k(frob_norm):
        raise kind("enough")

    summary = session.compute.apply("k", "stable_rank")
    assert all(f.reason == f"{kind.__name__}: enough" for f in summary.failed)
    assert states(session, "stable_rank") == ["fresh"] * 3


@pytest.mark.parametrize("status", [lambda judged: 1 / 0, lambda judged: np.zeros(77, np.uint8)])
def test_a_status_that_raises(session, status):
    @kernel(judged=Field("J"), version=1, status=status)
    def judge(frob_norm):
        return frob_norm

    session.compute.registry.add(judge)
    summary = session.compute.apply("judged", "stable_rank")
    assert {f.kernel for f in summary.failed} == {"judge"}
    assert np.isnan(shown(session, "judged")).all()
    assert np.isfinite(shown(session, "stable_rank")).all()


@pytest.mark.parametrize("name", ["collect", "weights", "digest", "scatter", "state-singular_values", "read-spans"])
def test_a_kernel_may_be_called_as_the_engine_calls_its_own_tasks(session, name):
    session.compute.kernel(name=name, produce_fields=["doubled"], version=1)(lambda frob_norm: frob_norm * 2)
    lazy = session.compute.lazy("doubled", "stable_rank").compute()
    session.compute.apply("doubled", "stable_rank")
    np.testing.assert_array_equal(shown(session, "doubled"), fresh(weights(), "frob_norm") * 2)
    np.testing.assert_array_equal(lazy.doubled, shown(session, "doubled"))


@pytest.mark.parametrize("name", ["status", "step", "rows", "not a name", "x" * 300])
def test_a_field_that_cannot_be_stored_is_refused_when_it_is_declared(session, name):
    with pytest.raises(errors.KernelRegistrationError, match="cannot be called"):
        session.compute.kernel(name=name, version=1)(lambda frob_norm: frob_norm)
    with pytest.raises(errors.KernelRegistrationError, match="cannot be called"):
        session.compute.variant("hard_rank", name)


def test_a_kernel_over_pairs_is_refused(session):
    with pytest.raises(errors.KernelRegistrationError, match="pairs"):
        session.compute.kernel(name="k", version=1, level="pair")(lambda frob_norm: frob_norm)


def test_a_model_level_kernel_over_a_field_that_is_not_stored(session):
    session.compute.kernel(name="t", passing=Field("P", persist=False), version=1)(lambda frob_norm: frob_norm * 2)
    session.compute.kernel(name="total", version=1, level="model")(lambda passing: float(passing.sum()))
    lazy = session.compute.lazy("total").total.compute().values
    session.compute.apply("total")
    np.testing.assert_allclose(shown(session, "total"), fresh(weights(), "frob_norm").sum() * 2)
    np.testing.assert_array_equal(shown(session, "total"), lazy)
    assert session.compute.apply("total").computed == {}


# Model-level values: over what, and when


def test_a_tied_parameter_counts_where_the_first_one_is_not_in_scope():
    shared, other = weights(0, 1)["h.0.w.weight"], weights(2, 1)["h.0.w.weight"]
    norms = [float((x.astype(float) ** 2).sum()) for x in (shared, other)]
    session = Session()
    model = {"a.weight": shared, "b.weight": shared, "c.weight": other}
    session.models.add(model, "m")
    session.compute.apply("param_norm")
    part = session.filter(param_names="b.*")
    np.testing.assert_allclose(shown(part, "param_norm"), norms[0])
    np.testing.assert_allclose(part.compute.lazy("param_norm").param_norm, norms[0])
    skipping = Session()
    skipping.models.add(model, "m", overrides={"a.weight": {"skip": True}})
    skipping.compute.apply("param_norm")
    np.testing.assert_allclose(shown(skipping, "param_norm"), sum(norms))


def test_the_order_of_slices_does_not_depend_on_other_models():
    session = Session()
    norms = {"w.2": 2.0, "w.10": 10.0, "w.1": 1.0}
    session.models.add({name: np.eye(2) for name in ("w.10", "w.2", "v.1")}, "first")
    session.models.add({name: np.diag([norm, 0.0]) for name, norm in norms.items()}, "m")
    session.compute.kernel(name="last", version=1, level="model")(lambda frob_norm: frob_norm[-1] + frob_norm[0] / 100)
    lazy = session.compute.lazy("last").sel(model_id="m")["last"].compute()
    session.compute.apply("last")
    assert shown(session.filter(model_ids="m"), "last").tolist() == [lazy.item()] == [10.01]


def test_a_filtered_model_level_value_needs_only_its_own_model(session):
    session.models.add(weights(1), "n")
    session.filter(model_ids="m").compute.apply("param_norm")
    part = session.filter(param_names="h.0.*")
    first, second = shown(part, "param_norm")
    np.testing.assert_allclose(first, shown(session, "frob_norm")[0, 0] ** 2)
    assert np.isnan(second)


def test_erased_inputs_do_not_matter_to_what_is_stored(session):
    session.compute.kernel(name="total", version=1, level="model")(lambda frob_norm: float(frob_norm.sum()))
    session.compute.kernel(name="twice", version=1, level="model")(lambda total: total * 2)
    session.compute.apply("twice")
    value = shown(session, "twice")
    session.results.erase("total")
    session.results.erase("frob_norm")
    assert session.compute.plan("twice").nothing_to_do
    np.testing.assert_array_equal(session.compute.lazy("twice").twice.compute(), value)


def test_stale_model_level_values_are_told(session):
    session.compute.kernel(name="total", level="model")(lambda frob_norm, *, a=1: float(frob_norm.sum()) * a)
    session.compute.apply("total")
    session.compute.configure_kernel("total", a=2)
    with pytest.warns(errors.StaleValuesWarning, match="total"):
        session.results.dataset("total")


# What changes while values are computed


def meanwhile(session: Session, act: Any) -> None:
    """Declare a kernel that lets something happen once, while it runs."""
    done: list[bool] = []

    @session.compute.kernel(version=1)
    def slow(frob_norm):
        if not done:
            done.append(True)
            act()
        return frob_norm

    session.compute.kernel(name="total", version=1, level="model")(lambda slow: float(np.nansum(slow)))


@pytest.fixture
def two(tmp_path):
    """Two sessions on one store with the models m and n."""
    first = Session(str(tmp_path / "s.zarr"))
    first.models.add(weights(0), "m")
    first.models.add(weights(1), "n")
    return first, Session(str(tmp_path / "s.zarr"))


def test_a_model_that_is_added_meanwhile_gets_no_value_of_nothing(two):
    first, second = two
    meanwhile(first, lambda: second.models.add(weights(7), "new"))
    assert first.compute.apply("slow", "total").computed["total"] == 2
    assert np.isnan(shown(first, "total")[2])
    first.compute.apply("slow", "total")
    np.testing.assert_allclose(shown(first, "total")[2], fresh(weights(7), "frob_norm").sum())


@pytest.mark.parametrize(
    "act",
    [
        lambda session: session.models.erase("m"),
        lambda session: session.models.rename("m", "q"),
        lambda session: session.models.add(weights(5, 1), "m", replace=True),
        lambda session: session.models.add(weights(5, 3), "m", replace=True),
    ],
    ids=["erased", "renamed", "replaced by fewer", "replaced"],
)
def test_a_model_that_is_gone_meanwhile_does_not_stop_the_others(two, act):
    first, second = two
    meanwhile(first, lambda: act(second))
    with pytest.warns(errors.ModelChangedWarning, match="'m'"):
        summary = first.compute.apply("slow", "total")
    assert summary.computed["slow"] == 3
    assert states(first.filter(model_ids="n"), "slow") == ["fresh"] * 3
    assert set(states(first.filter(model_ids=["m", "q"]), "slow")) <= {"missing", ""}
    first.compute.apply("slow", "total")
    slow, total = shown(first, "slow", "total")
    np.testing.assert_allclose(total, np.nansum(slow, axis=1))


def test_a_linked_file_that_changes_meanwhile(tmp_path):
    path = tmp_path / "m.safetensors"
    write_safetensors(path, weights(0))
    session = Session(str(tmp_path / "s.zarr"))
    session.models.add(path, "m", link=True)

    def rewrite():
        write_safetensors(path, weights(1))
        os.utime(path, ns=(1, 1))

    meanwhile(session, rewrite)
    with pytest.warns(errors.ModelChangedWarning):
        session.compute.apply("slow", "total")
    assert set(states(session, "slow")) == {"stale"}
    session.compute.apply("slow", "total")
    np.testing.assert_array_equal(shown(session, "slow"), fresh(weights(1), "frob_norm"))
    np.testing.assert_allclose(shown(session, "total"), shown(session, "slow").sum())


def test_a_linked_file_that_changes_unseen(tmp_path):
    """Same size, same time: what is read tells it, and nothing of the old content is mixed in."""
    paths = [tmp_path / "m.safetensors", tmp_path / "n.safetensors"]
    session = Session(str(tmp_path / "s.zarr"))
    for path in paths:
        write_safetensors(path, weights(0))
        session.models.add(path, path.stem, link=True)
    session.compute.apply("weights_svals", "frob_norm", "param_norm")
    assert session.compute.plan("weights_svals", "frob_norm", "param_norm").nothing_to_do
    state = os.stat(paths[0])
    write_safetensors(paths[0], weights(1))
    os.utime(paths[0], ns=(state.st_atime_ns, state.st_mtime_ns))

    def declare(to):
        to.compute.kernel(name="k", version=1)(lambda weights, weights_svals: weights.max() / weights_svals.sum())
        to.compute.kernel(name="total", version=1, level="model")(lambda k: float(k.sum()))

    declare(session)
    session.compute.apply("k", "total")
    for i, seed in enumerate((1, 0)):
        other = Session()
        other.models.add(weights(seed), "m")
        declare(other)
        other.compute.apply("k", "total")
        np.testing.assert_array_equal(shown(session, "k")[i], shown(other, "k")[0])
        np.testing.assert_array_equal(shown(session, "total")[i], shown(other, "total")[0])


@pytest.mark.filterwarnings("ignore::diffract_dask.errors.LinkBrokenWarning")
@pytest.mark.parametrize("stream", [False, True])
def test_a_linked_file_that_is_gone_does_not_stop_the_others(tmp_path, stream):
    path = tmp_path / "m.safetensors"
    write_safetensors(path, weights(0, shape=(300, 20)))
    session = Session(str(tmp_path / "s.zarr"))
    session.models.add(path, "gone", link=True)
    session.models.add(weights(1, shape=(300, 20)), "n")
    path.unlink()
    settings = {"diffract_dask.stream-above": "1 kB", "diffract_dask.read-size": "4 kiB"} if stream else {}
    lazy = session.compute.lazy("nuclear_norm", "frob_norm")
    with dask.config.set(settings), pytest.raises(errors.LinkBrokenError, match=r"m\.safetensors"):
        session.compute.apply("nuclear_norm", "frob_norm", "param_norm")
    assert states(session, "nuclear_norm") == ["missing"] * 3 + ["fresh"] * 3
    assert np.isfinite(shown(session, "param_norm")).tolist() == [False, True]
    assert np.isfinite(lazy.sel(model_id="n").nuclear_norm.compute()).all()
    with pytest.raises(errors.LinkBrokenError):
        lazy.compute()


@pytest.mark.filterwarnings("ignore::diffract_dask.errors.LinkBrokenWarning")
def test_a_linked_file_that_is_gone_while_another_model_has_its_content(tmp_path):
    path = tmp_path / "m.safetensors"
    write_safetensors(path, weights(0))
    session = Session(str(tmp_path / "s.zarr"))
    session.models.add(path, "gone", link=True)
    session.compute.apply("frob_norm")
    session.models.add(path, "copy")
    path.unlink()
    assert session.compute.apply("nuclear_norm").computed["nuclear_norm"] == 6
    np.testing.assert_array_equal(shown(session, "nuclear_norm"), np.tile(fresh(weights(0), "nuclear_norm"), (2, 1)))


def test_stored_arrays_that_change_after_the_plan(two, monkeypatch):
    first, second = two
    for session in two:
        declare = session.compute.kernel(name="make", made=Field("M", dims=("sval",)), version=1)
        declare(eval("lambda weights_svals, *, a=1.0: weights_svals * a"))
        session.compute.kernel(name="use", version=1)(lambda made: made.sum())
    first.compute.apply("made")
    lazy = first.compute.lazy("made", "use")
    expected = shown(first, "made").sum(-1)
    second.compute.configure_kernel("make", a=100.0)
    blocks = graph.blocks

    def after_a_change(*args, **kwargs):
        monkeypatch.undo()
        second.compute.apply("made")
        yield from blocks(*args, **kwargs)

    monkeypatch.setattr(graph, "blocks", after_a_change)
    first.compute.apply("use")  # another round makes them anew
    np.testing.assert_allclose(shown(first, "use"), expected)
    second.compute.apply("made")
    with pytest.raises(errors.StoreError, match="changed or erased"):
        lazy.made.compute()
    np.testing.assert_allclose(lazy.use.compute(), expected)
    first.compute.apply("use")
    np.testing.assert_allclose(shown(first, "use"), expected)


@pytest.mark.parametrize(
    "act",
    [
        lambda session: session.models.erase("m"),
        lambda session: session.models.add(weights(5, 1), "m", replace=True),
        lambda session: session.models.add(weights(5, 3), "m", replace=True),
    ],
    ids=["erased", "replaced by fewer", "replaced"],
)
def test_a_model_that_is_gone_after_the_plan_while_another_one_has_its_content(two, act, monkeypatch):
    first, second = two
    with pytest.warns(errors.DuplicateContentWarning):
        first.models.add(weights(0), "copy")
    blocks = graph.blocks

    def after_a_change(*args, **kwargs):
        monkeypatch.undo()
        act(second)
        yield from blocks(*args, **kwargs)

    monkeypatch.setattr(graph, "blocks", after_a_change)
    first.compute.apply("frob_norm", "param_norm")  # reads the copy, once the first one is found to be gone
    for model_id, seed in (("copy", 0), ("n", 1)):
        part = first.filter(model_ids=model_id)
        np.testing.assert_array_equal(shown(part, "frob_norm"), fresh(weights(seed), "frob_norm"))
        np.testing.assert_array_equal(shown(part, "param_norm"), fresh(weights(seed), "param_norm"))


def test_two_sessions_compute_the_same_at_once(two):
    summaries: list[Any] = []

    def work(session, fields):
        summaries.append(session.compute.apply(*fields))

    with dask.config.set({"diffract_dask.batch-seconds": 1e-6}):
        threads = [
            threading.Thread(target=work, args=(session, fields))
            for session, fields in zip(
                two, (("stable_rank", "param_norm"), ("nuclear_norm", "param_norm")), strict=True
            )
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(summaries) == 2
    assert two[0].compute.plan("stable_rank", "nuclear_norm", "param_norm").nothing_to_do
    np.testing.assert_allclose(shown(two[0], "param_norm"), (shown(two[0], "frob_norm") ** 2).sum(1))


INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
import sys, time, dask
from diffract_dask import Session

if __name__ == "__main__":
    dask.config.set({"diffract_dask.batch-seconds": 0.001})
    if sys.argv[2] == "processes":
        from distributed import Client, LocalCluster
        client = Client(LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0"))
    session = Session(sys.argv[1])

    @session.compute.kernel(version=1)
    def slow(frob_norm):
        import time
        time.sleep(0.05)
        return frob_norm

    print("ready", flush=True)
    try:
        session.compute.apply("slow", "param_norm")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    if sys.argv[2] == "processes":
        client.shutdown()
"""


@pytest.mark.parametrize("where", ["threads", "processes"])
def test_interrupt_and_resume(tmp_path, where):
    session = Session(str(tmp_path / "s.zarr"))
    for i in range(6):
        session.models.add(weights(i, 10), f"m{i}")
    (tmp_path / "job.py").write_text(INTERRUPTED)
    command = [sys.executable, str(tmp_path / "job.py"), str(tmp_path / "s.zarr"), where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.7)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[0] == "interrupted\n"
    session.compute.kernel(name="slow", version=1)(lambda frob_norm: frob_norm)
    session.compute.apply("slow", "param_norm")
    slow, norms, total = shown(session, "slow", "frob_norm", "param_norm")
    np.testing.assert_array_equal(slow, norms)
    np.testing.assert_allclose(total, (norms**2).sum(1))


# Requests at the edges


@pytest.mark.parametrize(
    "selection",
    [
        {"model_ids": []},
        {"param_names": []},
        {"param_names": "nothing"},
        {"param_types": "conv"},
        {"param_ids": ["nothing"]},
    ],
    ids=str,
)
def test_a_selection_of_nothing(session, selection, no_compute):
    part = session.filter(**selection)
    fields = ("frob_norm", "weights_svals", "param_norm")
    with pytest.warns(errors.NothingAnalysedWarning, match=r"no (model|parameter) in scope"):
        assert part.compute.apply(*fields).computed == {}
    assert part.compute.plan(*fields).nothing_to_do
    assert part.compute.lazy(*fields).sizes["name"] == 0
    assert part.results.dataset(*fields).sizes["name"] == 0
    assert part.results.status(*fields).state.size == 0
    assert part.results.export_metrics(*fields, export_format="list") == []
    assert part.results.erase(*fields).affected_uids == ()


def test_no_model_at_all(no_compute):
    session = Session()
    with pytest.warns(errors.NothingAnalysedWarning):
        session.compute.apply("frob_norm", "param_norm")
    lazy = session.compute.lazy("frob_norm", "weights_svals", "param_norm")
    assert dict(lazy.sizes) == {"model_id": 0, "name": 0, "sval": 0}
    assert session.results.dataset("weights_svals", "param_norm").sizes["model_id"] == 0
    assert session.results.dataset().sizes == {"model_id": 0, "name": 0}


@pytest.mark.parametrize("patterns", [5, [5], b"h.*", [None], [["h.*"]]])
def test_a_selection_that_is_no_text(session, patterns):
    with pytest.raises(errors.FilterError, match="no selection"):
        session.filter(param_names=patterns)


def test_a_selection_from_a_dataset(session):
    session.models.add(weights(1), "n")
    session.compute.apply("frob_norm")
    dataset = session.results.dataset("frob_norm")
    assert session.filter(model_ids=dataset.model_id[:1]).models.list() == ["m"]
    assert [session.filter(model_ids=model_id).models.list() for model_id in dataset.model_id] == [["m"], ["n"]]
    assert session.filter(model_ids=iter(np.array(["n"]))).models.list() == ["n"]


@pytest.mark.parametrize("call", ["apply", "plan", "lazy", "dataset", "status", "export", "erase"])
@pytest.mark.parametrize("fields", [["frob_norm"], None, 3])
def test_fields_that_are_no_names(session, call, fields):
    space = session.compute if call in ("apply", "plan", "lazy") else session.results
    with pytest.raises(errors.SessionError, match="one by one"):
        getattr(space, call)(fields)


@pytest.mark.parametrize("params", [["hard_rank"], {"hard_rank": 3}, {"hard_rank": {"rtl": 1}}])
def test_parameters_of_a_call_are_checked(session, params):
    with pytest.raises(errors.ConfigurationError):
        session.compute.apply("frob_norm", params=params)


@pytest.mark.parametrize(
    "text",
    [
        "threads: two",
        "threads: -1",
        "batch-seconds: soon",
        "view-interval: -3",
        "lock-timeout: soon",
        "kernels: 3",
        "kernels: {hard_rank: 3}",
        "kernels: {hard_rank: {rt: 1}}",
        "progress: maybe",
        "memory-budget: lots",
        "memory-budget: -1",
        "read-size: [1]\nstream-above: 0",
    ],
)
def test_settings_that_make_no_sense(tmp_path, text):
    path = tmp_path / "settings.yaml"
    path.write_text(text)

    def use():
        session = Session(config_path=path)
        session.models.add(weights(), "m")
        session.compute.apply("nuclear_norm")

    with pytest.raises(errors.ConfigurationError):
        use()


def test_settings_of_a_session_reach_the_tasks(tmp_path, monkeypatch):
    (tmp_path / "settings.yaml").write_text("stream-above: 1 kB\nread-size: 3 kiB\nthreads: 1\n")
    session = Session(config_path=tmp_path / "settings.yaml")
    session.models.add(weights(shape=(300, 20)), "m")
    sizes = []
    read = graph.read_span

    def noted(slices, streams, start, stop, read_size, digest):
        sizes.append(read_size)
        return read(slices, streams, start, stop, read_size, digest)

    monkeypatch.setattr(graph, "read_span", noted)
    session.compute.apply("nuclear_norm")
    assert set(sizes) == {3 * 1024}


def test_callbacks_of_the_caller_see_the_tasks(session):
    with Tasks() as tasks:
        session.compute.apply("stable_rank")
    assert {"weights", "singular_values", "stable_rank"} <= set(tasks.layers)


def test_one_model_of_a_lazy_dataset_runs_the_tasks_of_that_model():
    session = Session()
    for i in range(3):
        session.models.add(weights(i), f"m{i}")
    lazy = session.compute.lazy("stable_rank", "weights_svals", "param_norm")
    with Tasks() as tasks:
        lazy.isel(model_id=[1]).compute()
    assert tasks.layers.count("weights") == 1
    assert tasks.layers.count("singular_values") == 1


def test_one_field_of_a_lazy_dataset_runs_what_it_needs(session):
    lazy = session.compute.lazy("weights_mean", "weights_lsvs", "param_norm", "log_spectral_norm")
    with Tasks() as tasks:
        lazy.param_norm.compute()
    ran = " ".join(tasks.layers)  # xarray lets Dask fuse tasks, whose names are joined then
    assert "entry_statistics" in ran
    assert "singular" not in ran


def test_lazy_is_labelled_as_the_results_are(session):
    session.models.add(weights(1, 4, (5, 9)), "first", step=1)
    session.models.add(weights(2), "last", step=9)
    session.filter(model_ids="m", param_names="h.1.*").compute.apply("stable_rank", "weights_svals")
    fields = ("stable_rank", "weights_svals", "esd", "param_norm")
    lazy = session.compute.lazy(*fields).compute()
    session.compute.apply(*fields)
    assert lazy.identical(session.results.dataset(*fields))


IDS = [
    "a/b",
    "with space",
    "ünïcode-π",
    "q'uo\"te",
    "x" * 300,
    "..",
    ".hidden",
    "CON",
    "re:x",
    "[0-9]",
    "*",
    "zarr.json",
]


def test_any_printable_id_and_name(tmp_path):
    session = Session(str(tmp_path / "s.zarr"))
    for i, model_id in enumerate(IDS):
        session.models.add({f"{model_id}|{name}": w for name, w in weights(i, 2).items()}, model_id)
    session.compute.apply("stable_rank", "weights_svals", "param_norm")
    for i, model_id in enumerate(IDS):
        part = session.filter(model_ids=model_id)
        assert part.models.list() == [model_id]
        np.testing.assert_array_equal(shown(part, "stable_rank")[0], fresh(weights(i, 2), "stable_rank")[0])
        assert len(session.filter(param_names=f"{model_id}|h.0.w.weight").models.parameters()) == 1
    reading = Session(str(tmp_path / "s.zarr"), mode="r")
    assert reading.compute.apply("stable_rank").reused == {"stable_rank": 2 * len(IDS)}
    with pytest.raises(errors.ReadOnlyStoreError):
        reading.compute.apply("nuclear_norm")
    assert np.isfinite(reading.compute.lazy("nuclear_norm").nuclear_norm.compute()).sum() == 2 * len(IDS)


# Values from elsewhere


def test_ingested_values_leave_the_other_outputs_fresh(session):
    uid = session.models.parameters("m").uid[0]
    session.compute.apply("stable_rank")
    session.results.ingest_metrics({uid: {"frob_norm": 1e6}}, force=True)
    assert states(session, "frob_norm") == ["ingested", "fresh", "fresh"]
    assert states(session, "weights_mean") == ["fresh"] * 3
    session.results.dataset("frob_norm")  # no warning of stale values
    assert session.compute.apply("frob_norm").computed["frob_norm"] == 1
    np.testing.assert_array_equal(shown(session, "frob_norm"), fresh(weights(), "frob_norm"))
    session.results.ingest_metrics({uid: {"stable_rank": 1e6}}, force=True)
    session.results.erase("stable_rank")
    assert session.compute.apply("stable_rank").computed["stable_rank"] == 3


def test_an_ingested_value_stays_until_its_field_is_asked_for(session):
    uid = session.models.parameters("m").uid[0]
    session.compute.apply("frob_norm")
    session.results.ingest_metrics({uid: {"frob_norm": 1e6}}, force=True)
    session.models.add({"another": weights()["h.0.w.weight"]}, "n")
    session.results.erase("weights_mean")
    session.compute.apply("weights_mean", "stable_rank")
    assert shown(session, "frob_norm")[0, 0] == 1e6
    assert states(session.filter(model_ids="m"), "frob_norm") == ["ingested", "fresh", "fresh"]
    assert "ingested" not in states(session.filter(model_ids="n"), "frob_norm")
    np.testing.assert_allclose(shown(session, "stable_rank")[0, :3], fresh(weights(), "stable_rank")[0])
    everywhere = {uid: {"frob_norm": 1e6} for uid in session.models.parameters("m").uid}
    session.results.ingest_metrics(everywhere, force=True)
    session.results.erase("weights_mean")
    session.compute.apply("weights_mean")
    assert states(session.filter(model_ids="m"), "frob_norm") == ["ingested"] * 3
    session.compute.apply("param_norm")
    np.testing.assert_allclose(shown(session, "param_norm")[0], fresh(weights(), "param_norm")[0])
    assert "ingested" not in states(session, "frob_norm")


def test_an_ingested_value_in_place_of_a_failure(session):
    Flaky().register(session)
    session.compute.kernel(name="after", version=1)(lambda flaky: flaky + 1)
    session.results.ingest_metrics({uid: {"flaky": 1.0} for uid in session.models.parameters("m").uid})
    assert len(session.compute.apply("after").failed) == 3
    assert states(session, "flaky") == ["ingested"] * 3
    assert session.compute.apply("after").kernel_slices == {}


def test_an_ingested_value_of_a_skipped_parameter_is_shown_as_such():
    session = Session()
    session.models.add({**weights(), "bias": np.ones(3)}, "m")
    uid = session.models.parameters("m").set_index("name").uid["bias"]
    session.results.ingest_metrics({uid: {"mine": 1.5}})
    status = session.results.status("mine").sel(model_id="m", field="mine")
    assert status.state.sel(name="bias") == "ingested"
    assert status.state.sel(name="h.0.w.weight") == "missing"


def test_ingested_aggregates_follow_their_models(session):
    session.models.add(weights(1), "n")
    session.results.ingest_aggregates(
        [
            {"field_name": "accuracy", "context_models": "n", "value": 0.5},
            {"field_name": "distance", "context_models": ["n", "m"], "value": 2.0},
        ]
    )
    np.testing.assert_array_equal(shown(session, "accuracy"), [np.nan, 0.5])
    session.models.rename("n", "a")
    found = session.results.export_aggregates("accuracy", "distance", export_format="list")
    assert {tuple(item["context_models"]) for item in found} == {("a",), ("a", "m")}
    with pytest.raises(errors.SessionError, match="force=True"):
        session.results.ingest_aggregates([{"field_name": "distance", "context_models": ["m", "a"], "value": 3.0}])
    assert session.results.erase("accuracy").fields == ("accuracy",)
    session.models.erase("m")
    with pytest.raises(errors.FieldNotFoundError):
        session.results.export_aggregates("distance")


@pytest.mark.parametrize(
    "given",
    [[3], [{"field_name": "f"}], [{"field_name": "f", "context_models": [], "value": 1}]],
)
def test_aggregates_that_make_no_sense(session, given):
    with pytest.raises(errors.SessionError):
        session.results.ingest_aggregates(given)


@pytest.mark.parametrize("given", [3, {"my metric": 1}, {"f": "text"}, {"param_norm": 1}, {"weights_svals": 1}])
def test_metrics_that_make_no_sense(session, given):
    with pytest.raises(errors.SessionError):
        session.results.ingest_metrics({session.models.parameters("m").uid[0]: given})


def test_array_fields_that_are_stored_for_different_parameters():
    session = Session()
    rng = np.random.default_rng(0)
    session.models.add({"a": rng.random((3, 9)), "b": rng.random((20, 4)), "c": rng.random((6, 5))}, "m")
    session.filter(param_names="a").compute.apply("weights_lsvs")
    session.filter(param_names="b").compute.apply("weights_svals")
    session.filter(param_names="c").compute.apply("weights_rsvs")
    dataset = session.results.dataset("weights_lsvs", "weights_svals", "weights_rsvs")
    assert dataset.sizes == {"model_id": 1, "name": 3, "row": 3, "sval": 5, "col": 5}
    assert dataset.weights_svals_size.values.tolist() == [[3, 4, 5]]


def test_results_of_kernels_that_this_session_does_not_know(two):
    first, second = two
    first.compute.kernel(name="k", version=1)(lambda frob_norm: frob_norm)
    first.compute.kernel(name="spectrum", spectrum=Field("S", dims=("sval",)), version=1)(
        lambda weights_svals: weights_svals
    )
    first.compute.kernel(name="total", version=1, level="model")(lambda frob_norm: float(frob_norm.sum()))
    first.compute.apply("k", "spectrum", "total")
    assert second.results.dataset("k", "spectrum", "total").identical(first.results.dataset("k", "spectrum", "total"))
    assert set(states(second, "spectrum")) == {"stale"}
    assert len(second.results.status().field) > 3
    assert set(second.results.erase("k", "spectrum", "total").fields) == {"k", "spectrum", "total"}


@pytest.mark.parametrize("export_format", ["dict", "json", "list", "pandas", "polars", "xarray"])
def test_ragged_fields_with_missing_values_in_every_format(export_format):
    if export_format == "polars":
        pytest.importorskip("polars")
    session = Session()
    rng = np.random.default_rng(0)
    session.models.add({"a": rng.random((3, 9)), "b": rng.random((20, 4)), "bias": np.ones(4)}, "m")
    session.models.add({"c": rng.random((7, 7))}, "n")
    with pytest.warns(errors.NothingAnalysedWarning):
        session.models.add({"v": np.ones(3)}, "nothing")
    session.filter(model_ids="m").compute.apply("weights_svals", "weights_lsvs", "param_norm")
    fields = ("weights_svals", "weights_lsvs", "frob_norm", "param_norm")
    assert session.results.export(*fields, export_format=export_format) is not None
    dataset = session.results.dataset(*fields)
    assert dataset.weights_svals_size.values.tolist() == [[3, 4, 0, 0, 0], [0] * 5, [0] * 5]
    states_of = session.results.status("param_norm").state.sel(field="param_norm")
    assert set(states_of.sel(model_id="m").values) == {"fresh", ""}
    assert set(states_of.sel(model_id="n").values) == {"missing", ""}
