"""Declarations, the registry and keys."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diffract_dask.errors import (
    CircularDependencyError,
    ConfigurationError,
    FieldNotFoundError,
    KernelNotFoundError,
    KernelRegistrationError,
)
from diffract_dask.fields import Field
from diffract_dask.kernel import GIVEN, Kernel, Registry, canonical_json, kernel, mix, model_key

ROOT = np.uint64(12345)


@kernel(a=Field("A"), version=1)
def make_a(weights):
    return weights.sum((-1, -2))


@kernel(b=Field("B", dims=("sval",)), b_error=Field("B error"), version=1)
def make_b(weights, a, *, rtol=0.5, mode="fast"):
    return a, a


@kernel(c=Field("C"), version=1)
def make_c(b, shape, *, power=2):
    return b


@kernel(total=Field("Total"), level="model", version=1)
def total(a):
    return a.sum()


def registry() -> Registry:
    return Registry([make_a, make_b, make_c, total])


# Declarations


def test_the_signature_is_the_declaration() -> None:
    declared = make_b.__kernel__
    assert declared.name == "make_b"
    assert declared.inputs == ("weights", "a")
    assert dict(declared.defaults) == {"rtol": 0.5, "mode": "fast"}
    assert list(declared.outputs) == ["b", "b_error"]
    assert (declared.level, declared.batch, declared.version) == ("slice", True, 1)


def test_the_decorated_function_is_the_function_itself() -> None:
    def plain(weights):
        return weights

    assert kernel(plain) is plain
    assert isinstance(make_a, FunctionType)
    assert make_a(np.ones((2, 3))) == 6


def test_without_outputs_the_field_is_called_as_the_kernel() -> None:
    @kernel
    def top_share(esd):
        return esd

    assert list(top_share.__kernel__.outputs) == ["top_share"]
    assert top_share.__kernel__.outputs["top_share"].long_name == "top share"


def test_declarations_are_read_only() -> None:
    with pytest.raises(TypeError):
        make_b.__kernel__.outputs["x"] = Field("X")
    with pytest.raises(TypeError):
        make_b.__kernel__.defaults["rtol"] = 1.0


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda *fields: 0, r"\*fields is not allowed"),
        (lambda weights, **rest: 0, r"\*\*rest is not allowed"),
        (lambda weights, *, rtol: 0, "'rtol' is configuration and needs a default"),
        (lambda weights, rtol=1: 0, r"write '\*, rtol=1' for configuration"),
    ],
)
def test_signatures_that_are_refused(function: Callable[..., Any], says: str) -> None:
    with pytest.raises(KernelRegistrationError, match=says):
        kernel(name="odd", version=1)(function)


def test_persist_is_false_when_no_output_is_stored() -> None:
    @kernel(x=Field("X", persist=False), y=Field("Y", persist=False), version=1)
    def none(weights):
        return weights, weights

    @kernel(x=Field("X", persist=False), y=Field("Y"), version=1)
    def some(weights):
        return weights, weights

    assert not none.__kernel__.persist
    assert some.__kernel__.persist


# Registration


def test_closure_puts_each_kernel_after_what_it_needs() -> None:
    names = [one.name for one in registry().closure(["total", "c", "a"])]
    assert sorted(names) == ["make_a", "make_b", "make_c", "total"]
    assert names.index("make_a") < names.index("make_b") < names.index("make_c")
    assert names.index("make_a") < names.index("total")
    assert [one.name for one in registry().closure(["a"])] == ["make_a"]


def test_closure_of_a_long_chain() -> None:
    chain = Registry([make_a])
    for i in range(200):
        before = "a" if i == 0 else f"f{i - 1}"
        chain.add(Kernel(f"k{i}", abs, {f"f{i}": Field("F")}, (before,)))
    assert [one.name for one in chain.closure(["f199"])] == ["make_a", *(f"k{i}" for i in range(200))]


def test_fields_and_their_producers() -> None:
    one = registry()
    assert list(one.fields) == ["a", "b", "b_error", "c", "total"]
    assert one.producer("b_error").name == "make_b"
    assert one.field("b").dims == ("sval",)


@pytest.mark.parametrize("given", GIVEN)
def test_given_inputs_cannot_be_produced(given: str) -> None:
    with pytest.raises(KernelRegistrationError, match=f"'{given}' is given by the slice itself"):
        registry().add(Kernel("k", abs, {given: Field("G")}, ("a",)))


@pytest.mark.parametrize("level", ["slice", "model"])
def test_an_input_that_nobody_produces(level: Any) -> None:
    with pytest.raises(KernelRegistrationError, match=r"needs the field 'b_eror'.*Did you mean 'b_error'"):
        registry().add(Kernel("k", abs, {"f": Field("F")}, ("b_eror",), level=level))


def test_a_taken_name_and_a_taken_field() -> None:
    one = registry()
    with pytest.raises(KernelRegistrationError, match="'make_a' exists already; pass replace=True"):
        one.add(make_a)
    with pytest.raises(KernelRegistrationError, match="the field 'a' is produced by kernel 'make_a'"):
        one.add(Kernel("other", abs, {"a": Field("A")}, ("weights",)))


def test_replacing_a_kernel() -> None:
    one = registry()
    new = Kernel("make_a", abs, {"a": Field("New A"), "more": Field("More")}, ("shape",), version=2)
    assert one.add(new, replace=True) is new
    assert one.producer("a") is one.producer("more") is new
    assert one.field("a").long_name == "New A"


def test_a_replacement_must_go_on_making_what_others_need() -> None:
    one = registry()
    with pytest.raises(KernelRegistrationError, match="cannot replace the present one: kernel 'make_b' needs"):
        one.add(Kernel("make_a", abs, {"z": Field("Z")}, ("weights",)), replace=True)
    with pytest.raises(KernelRegistrationError, match="kernel 'make_b' is slice-level and cannot take the model-level"):
        one.add(Kernel("make_a", abs, {"a": Field("A")}, ("b_error",), level="model"), replace=True)


def test_a_circle_is_named() -> None:
    one = registry()
    with pytest.raises(CircularDependencyError, match="make_a → make_c → make_b → make_a"):
        one.add(Kernel("make_a", abs, {"a": Field("A")}, ("c",)), replace=True)
    with pytest.raises(CircularDependencyError, match="self → self"):
        one.add(Kernel("self", abs, {"s": Field("S")}, ("s",)))


def test_a_refused_kernel_leaves_the_registry_as_it_was() -> None:
    one = registry()
    with pytest.raises(CircularDependencyError):
        one.add(Kernel("make_a", abs, {"a": Field("A")}, ("c",)), replace=True)
    with pytest.raises(KernelRegistrationError):
        one.add(Kernel("late", abs, {"fresh": Field("F"), "a": Field("A")}, ("b",)))
    assert list(one.kernels) == ["make_a", "make_b", "make_c", "total"]
    assert list(one.fields) == ["a", "b", "b_error", "c", "total"]
    assert one.producer("a") is make_a.__kernel__


def test_levels_and_dimensions_must_agree() -> None:
    one = registry()
    with pytest.raises(KernelRegistrationError, match="slice-level and cannot take the model-level field 'total'"):
        one.add(Kernel("k", abs, {"f": Field("F")}, ("total",)))
    with pytest.raises(KernelRegistrationError, match="model-level and takes one number per slice; 'b' is an array"):
        one.add(Kernel("k", abs, {"f": Field("F")}, ("b",), level="model"))
    with pytest.raises(KernelRegistrationError, match="'weights' is an array"):
        one.add(Kernel("k", abs, {"f": Field("F")}, ("weights",), level="model"))
    with pytest.raises(KernelRegistrationError, match="its field 'f' is one number"):
        one.add(Kernel("k", abs, {"f": Field("F", dims=("sval",))}, ("a",), level="model"))
    with pytest.raises(KernelRegistrationError, match="dimension 'svals'; known are sval, row, col"):
        one.add(Kernel("k", abs, {"f": Field("F", dims=("svals",))}, ("a",)))  # type: ignore[arg-type]
    one.add(Kernel("k", abs, {"f": Field("F")}, ("total", "a"), level="model"))


def test_an_undecorated_function_is_refused() -> None:
    with pytest.raises(KernelRegistrationError, match="abs is not a kernel; decorate the function with @kernel"):
        Registry([abs])


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(KernelNotFoundError, match=r"no kernel 'make_aa'. Did you mean 'make_a'"):
        registry().kernel("make_aa")
    with pytest.raises(FieldNotFoundError, match=r"produces the field 'b_eror'. Did you mean 'b_error'"):
        registry().producer("b_eror")


def test_a_copy_is_independent() -> None:
    one = registry()
    one.configure("make_b", rtol=0.1)
    two = one.copy()
    two.configure("make_b", rtol=0.2)
    two.variant("make_c", "c_cubed", power=3)
    assert one.params("make_b")["rtol"] == 0.1
    assert "c_cubed" not in one.fields


# Parameters


def test_parameters_in_force() -> None:
    one = registry()
    assert one.params("make_b") == {"rtol": 0.5, "mode": "fast"}
    assert one.configure("make_b", rtol=0.1) == {"rtol": 0.1, "mode": "fast"}
    assert one.configure("make_b", mode="slow") == {"rtol": 0.1, "mode": "slow"}
    assert one.params("make_b", {"make_b": {"rtol": 0.7}, "make_c": {"power": 1}}) == {"rtol": 0.7, "mode": "slow"}
    assert one.params("make_b") == {"rtol": 0.1, "mode": "slow"}


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"rtoll": 1}, "no parameter 'rtoll'; it has mode, rtol. Did you mean"),
        ({"rtol": object()}, "parameters must be JSON values"),
    ],
)
def test_a_refused_parameter_changes_nothing(params: dict[str, Any], says: str) -> None:
    one = registry()
    with pytest.raises(ConfigurationError, match=says):
        one.configure("make_b", **params)
    assert one.params("make_b") == {"rtol": 0.5, "mode": "fast"}
    one.params("make_b")
    with pytest.raises(ConfigurationError, match="it has none"):
        one.configure("make_a", rtol=1)


def test_variant() -> None:
    one = registry()
    made = one.variant("make_c", "c_cubed", power=3)
    assert one.field("c_cubed").long_name == "C (power=3)"
    assert made.function is make_c
    assert one.params("c_cubed") == {"power": 3}
    assert one.params("make_c") == {"power": 2}
    assert made.root() != make_c.__kernel__.root({"power": 3})
    with pytest.raises(KernelRegistrationError, match="2 outputs; a variant needs a kernel with one"):
        one.variant("make_b", "b2", rtol=1)
    with pytest.raises(ConfigurationError, match="no parameter 'powr'"):
        one.variant("make_c", "c4", powr=4)
    with pytest.raises(KernelRegistrationError, match="'c_cubed' exists already"):
        one.variant("make_c", "c_cubed", power=4)


def test_a_variant_follows_the_version_of_its_kernel() -> None:
    def root(version: int) -> np.uint64:
        one = Registry([Kernel("k", abs, {"f": Field("F")}, ("weights",), {"p": 1}, version)])
        return one.variant("k", "f2", p=2).root()

    assert root(1) != root(2)


# Roots and keys


def test_root_depends_on_name_version_and_parameters_only() -> None:
    def make(**changed: Any) -> Kernel:
        return Kernel(
            **{
                "name": "k",
                "function": abs,
                "outputs": {"f": Field("F")},
                "inputs": ("weights",),
                "defaults": {"p": 1, "q": [1, 2]},
                "version": 1,
                **changed,
            }
        )

    root = make().root()
    assert make(function=max, batch=False).root() == root
    assert make().root({"p": 1}) == make().root({"q": (1, 2), "p": np.int64(1)}) == root
    assert (
        len(
            {
                root,
                make(name="l").root(),
                make(version=2).root(),
                make(version="1").root(),
                make().root({"p": 2}),
                make().root({"q": [2, 1]}),
            }
        )
        == 6
    )


def test_keys_are_the_same_in_every_release() -> None:
    assert Kernel("k", abs, {"f": Field("F")}, ("weights",), {"rtol": 1e-5}, 1).root() == 13901933338451671660
    assert mix(np.uint64(1), [np.array([1, 2], np.uint64), np.array([3, 0], np.uint64)]).tolist() == [
        13081471323253060095,
        0,
    ]
    assert model_key(np.uint64(1), ["b", "a"], [np.array([5, 6], np.uint64)]) == 1795436026742110350


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_canonical_json_does_not_depend_on_order(value: dict[str, Any]) -> None:
    assert canonical_json(value) == canonical_json(dict(reversed(value.items())))


@pytest.mark.parametrize(
    ("one", "other"),
    [(np.float64(0.1), 0.1), (np.arange(3), [0, 1, 2]), ((1, 2), [1, 2]), ({"x": np.bool_(True)}, {"x": True})],
)
def test_canonical_json_of_numpy_is_that_of_python(one: Any, other: Any) -> None:
    assert canonical_json(one) == canonical_json(other)


keys = hnp.arrays(np.uint64, st.integers(1, 20), elements=st.integers(1, 2**64 - 1), fill=st.nothing())


@given(keys, st.integers(0, 2**64 - 1))
def test_mix_is_elementwise_and_never_zero(first: np.ndarray, root: int) -> None:
    second = first[::-1].copy()
    mixed = mix(np.uint64(root), [first, second])
    assert mixed.dtype == np.uint64
    assert mixed.all()
    one_by_one = [mix(np.uint64(root), [first[i : i + 1], second[i : i + 1]])[0] for i in range(len(first))]
    assert mixed.tolist() == one_by_one
    square = mix(np.uint64(root), [first[:, np.newaxis], second[:, np.newaxis]])
    assert square[:, 0].tolist() == mixed.tolist()


@given(keys, st.data())
def test_mix_of_an_unknown_key_is_unknown(first: np.ndarray, data: st.DataObject) -> None:
    unknown = data.draw(hnp.arrays(np.bool_, first.shape))
    second = np.where(unknown, np.uint64(0), np.uint64(7))
    assert ((mix(ROOT, [first, second]) == 0) == unknown).all()
    assert ((mix(ROOT, [second, first]) == 0) == unknown).all()


@given(st.integers(1, 2**64 - 1), st.integers(1, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_mix_tells_position_number_value_and_root_apart(a: int, b: int, root: int) -> None:
    first, second = np.array([a], np.uint64), np.array([b], np.uint64)
    base = mix(np.uint64(root), [first, second])[0]
    assert base != mix(np.uint64(root ^ 1), [first, second])[0]
    assert base != mix(np.uint64(root), [first])[0]
    if a != b:
        assert base != mix(np.uint64(root), [second, first])[0]
        assert base != mix(np.uint64(root), [first, first])[0]


def test_a_key_that_would_be_zero_is_one() -> None:
    cancelling = np.array([2**64 - 0x9E3779B97F4A7C15, 5], np.uint64)  # the step of position 1, negated
    mixed = mix(np.uint64(0), [cancelling])
    assert mixed[0] == 1
    assert mixed[1] > 1


def test_mix_does_not_collide_on_a_million_keys() -> None:
    counting = np.arange(1, 1_000_001, dtype=np.uint64)
    assert len(np.unique(mix(ROOT, [counting, counting]))) == counting.size
    # bits are spread: each is set in about half of the keys, although the inputs differ in their lowest bits only
    bits = np.unpackbits(mix(ROOT, [counting]).view(np.uint8)).reshape(-1, 64).mean(0)
    assert np.abs(bits - 0.5).max() < 0.005


def test_mix_leaves_its_inputs_alone() -> None:
    first = np.array([1, 0], np.uint64)
    mix(ROOT, [first, first])
    assert first.tolist() == [1, 0]


@given(
    st.dictionaries(st.text(min_size=1, max_size=5), st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1),
    st.randoms(),
)
def test_model_key_depends_on_names_and_keys_not_on_order(slices: dict[str, tuple[int, int]], rng: Any) -> None:
    def key(names: list[str], changed: dict[str, tuple[int, int]]) -> np.uint64:
        columns = np.array([changed[name] for name in names], np.uint64).T
        return model_key(ROOT, names, list(columns))

    names = list(slices)
    shuffled = names.copy()
    rng.shuffle(shuffled)
    base = key(names, slices)
    assert base != 0
    assert key(shuffled, slices) == base
    some = names[0]
    assert key(names, slices | {some: (slices[some][0] + 1, slices[some][1])}) != base
    assert key(names, slices | {some: (slices[some][0], 0)}) == 0
    if slices[some][0] != slices[some][1]:
        assert key(names, slices | {some: slices[some][::-1]}) != base
    renamed = [*names[1:], names[0] + "~"]
    assert key(renamed, {**slices, names[0] + "~": slices[names[0]]}) != base
    assert key(names[1:], slices) != base if len(names) > 1 else True


def test_model_key_of_moved_values_differs() -> None:
    values = np.array([1, 2], np.uint64)
    assert model_key(ROOT, ["a", "b"], [values]) != model_key(ROOT, ["b", "a"], [values])


# Versions of kernels that state none: the hash of their code


def version_of(source: str, name: str = "f") -> Any:
    scope: dict[str, Any] = {"np": np, "kernel": kernel, "__name__": "user"}
    exec(textwrap.dedent(source), scope)
    return kernel(scope[name]).__kernel__.version


BASE = """
    def f(weights, *, p=1):
        return weights + 1
"""
DOCUMENTED = """
    def f(weights, *, p=1):
        "Old."
        return weights + 1
"""


def test_code_hash_is_of_what_runs() -> None:
    assert version_of(BASE).startswith("code:")
    assert version_of(BASE) == version_of(BASE.replace("p=1", "p=2"))  # a default is a parameter, so part of the root
    assert version_of(BASE) == version_of("\n\n" + BASE.replace("return", "# why\n        return"))
    assert version_of(DOCUMENTED) == version_of(DOCUMENTED.replace("Old.", "New."))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (BASE, BASE.replace("+ 1", "+ 2")),
        (BASE, BASE.replace("+ 1", "- 1")),
        (BASE, BASE.replace("weights + 1", "weights.sum()")),
        (
            "def f(weights):\n return g(weights)\ndef g(x):\n return x",
            "def f(weights):\n return g(weights)\ndef g(x):\n return -x",
        ),
        ("c = 1\ndef f(weights):\n return weights * c", "c = 2\ndef f(weights):\n return weights * c"),
        (
            "c = np.zeros(5000)\ndef f(weights):\n return c",
            "c = np.zeros(5000)\nc[2500] = 1\ndef f(weights):\n return c",
        ),
        (
            "def o(c):\n def f(weights): return c\n return f\nf = o(1)",
            "def o(c):\n def f(weights): return c\n return f\nf = o(2)",
        ),
        ("def f(weights):\n return [x + 1 for x in weights]", "def f(weights):\n return [x + 2 for x in weights]"),
        ("def f(weights):\n return weights in {1, 2}", "def f(weights):\n return weights in {1, 3}"),
        ("d = {'a': 1}\ndef f(weights):\n return d", "d = {'a': 2}\ndef f(weights):\n return d"),
        (
            "def g(x, y=1):\n return x\ndef f(weights):\n return g(weights)",
            "def g(x, y=2):\n return x\ndef f(weights):\n return g(weights)",
        ),
        (
            "o = 1\ndef m(g):\n def f(weights): return g(weights)\n return f\nf = m(lambda x: x)",
            "o = 1\ndef m(g):\n def f(weights): return g(weights)\n return f\nf = m(lambda x: -x)",
        ),
    ],
)
def test_code_hash_changes_with_the_code(before: str, after: str) -> None:
    assert version_of(before) != version_of(after)
    assert version_of(before) == version_of(before)


def test_code_hash_of_functions_that_call_each_other() -> None:
    source = "def f(weights):\n return g(weights)\ndef g(x):\n return f(x - 1) if x else {}"
    assert version_of(source.format(0)) == version_of(source.format(0)) != version_of(source.format(1))


def test_code_hash_is_the_same_in_every_process() -> None:
    source = """
        import numpy as np
        from diffract_dask.kernel import kernel

        names = {"alpha", "beta", "gamma"}
        class Thing: pass
        def outer(table, shared):
            @kernel
            def f(weights):
                "Doc."
                return np.sum(weights) if "x" in {"alpha", "beta", "gamma", "delta"} else (names, table, shared)
            return f
        print(outer({"b": {1, 2}, "a": Thing, "c": np.arange(3)}, max).__kernel__.version)
    """

    def printed(seed: str) -> str:
        run = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(source)],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        return run.stdout

    assert printed("1") == printed("2")


def test_code_that_cannot_be_hashed_must_state_a_version() -> None:
    handle = open(__file__)  # noqa: SIM115
    with handle:

        def reads(weights):
            return handle

        with pytest.raises(KernelRegistrationError, match=r"kernel 'reads'.*state its version"):
            kernel(reads)
        assert kernel(version=3)(reads).__kernel__.version == 3
