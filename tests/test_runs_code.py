"""What of a stage's code counts: whatever changes what it does, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from projects import Project

import diffract_dask.runs as dm

# Each holds @@, once 1 and once 2.
COUNTS = {
    "dataclass": "@dataclass\nclass C:\n    a: int = @@\ndef f(ctx): return C().a",
    "default factory": "@dataclass\nclass C:\n    a: list = field(default_factory=lambda: [@@])\n"
    "def f(ctx): return C().a",
    "object of a dataclass": "@dataclass\nclass C:\n    a: int\nX = C(@@)\ndef f(ctx): return X.a",
    "frozen with slots": "@dataclass(slots=True, frozen=True)\nclass C:\n    a: int\nX = C(@@)\ndef f(ctx): return X.a",
    "private slot": "class C:\n    __slots__ = '__a'\n    def __init__(s, a): s.__a = a\nX = C(@@)\n"
    "def f(ctx): return X",
    "cached property": "class C:\n    @functools.cached_property\n    def a(self): return @@\ndef f(ctx): return C().a",
    "cached method": "class C:\n    @functools.lru_cache\n    def a(self): return @@\ndef f(ctx): return C().a()",
    "partial method": "class C:\n    def g(s, x): return x\n    h = functools.partialmethod(g, @@)\n"
    "def f(ctx): return C().h()",
    "deleter": "class C:\n    @property\n    def a(s): pass\n    @a.deleter\n    def a(s): print(@@)\n"
    "def f(ctx): del C().a",
    "array of a class": "class C:\n    a = np.arange(@@)\ndef f(ctx): return C.a",
    "set of a class": "class C:\n    a = {@@}\ndef f(ctx): return C.a",
    "path of a class": "class C:\n    a = Path('@@')\ndef f(ctx): return C.a",
    "object of a class": "class D:\n    def __init__(s, a): s.a = a\nclass C:\n    d = D(@@)\ndef f(ctx): return C.d.a",
    "class in a class": "class C:\n    class D:\n        a = @@\ndef f(ctx): return C.D.a",
    "metaclass": "class M(type):\n    def __call__(c): return @@\nclass C(metaclass=M): pass\ndef f(ctx): return C()",
    "enumeration": "class E(enum.Enum):\n    A = @@\ndef f(ctx): return E.A.value",
    "deque of objects": "class A:\n    def g(s): return @@\nN = collections.deque([A()])\ndef f(ctx): return N[0].g()",
    "namespace": "def _g(): return @@\nN = types.SimpleNamespace(h=_g)\ndef f(ctx): return N.h()",
    "vectorized": "@np.vectorize\ndef g(x): return @@\ndef f(ctx): return g(1)",
    "kind of dict": "class A(dict):\n    def g(s): return @@\nN = A()\ndef f(ctx): return N.g()",
    "kind of list": "class A(list): pass\nN = A([@@])\ndef f(ctx): return N",
    "kind of float": "class A(float):\n    def g(s): return @@\nN = A()\ndef f(ctx): return N.g()",
    "kind of array": "class A(np.ndarray): pass\nN = np.arange(@@).view(A)\ndef f(ctx): return N",
    "dispatch": "@functools.singledispatch\ndef g(x): pass\n@g.register\ndef _(x: int): return @@\n"
    "def f(ctx): return g(1)",
    "decorating class": "class D:\n    def __init__(s, fn): functools.update_wrapper(s, fn)\n"
    "    def __call__(s, ctx): return @@\n@D\ndef f(ctx): return 1",
    "decorator with an argument": "def deco(n):\n    def d(fn):\n        @functools.wraps(fn)\n"
    "        def w(ctx): return n\n        return w\n    return d\n@deco(@@)\ndef f(ctx): pass",
    "read-only mapping": "X = types.MappingProxyType({'a': @@})\ndef f(ctx): return X",
    "compiled text": "ns = {}\nexec('def g(): return @@', ns)\ng = ns['g']\ndef f(ctx): return g()",
    "lambda": "f = lambda ctx: @@",
    "method": "class C:\n    def __init__(s, a): s.a = a\n    def go(s, ctx): return s.a\nf = C(@@).go",
    "configuration": "X = dm.Config(a=@@)\ndef f(ctx): return X.a",
}
DOES_NOT_COUNT = {
    "docstring within": "def f(ctx):\n    def g():\n        '''@@'''\n        return 1\n    return g()",
    "docstring of a method": "class C:\n    def g(self):\n        '''@@'''\ndef f(ctx): return C().g()",
    "docstring of a class": "class C:\n    '''@@'''\ndef f(ctx): return C()",
    "annotation": "def g(x: 'a@@'): return x\ndef f(ctx): return g(1)",
    "docstring of the module": "__doc__ = '@@'\ndef f(ctx): return __doc__",
}
IMPORTS = """
import collections, enum, functools, types
from dataclasses import dataclass, field
from pathlib import Path
import numpy as np
dm.register('v')
"""
TAIL = "\nPIPELINE = dm.Pipeline('p', [dm.Stage('s', f)])\n"


def fingerprints(project: Project, source: str) -> list[str]:
    found = []
    for value in ("1", "2", "1"):
        pipeline = project.declare("p", IMPORTS + source.replace("@@", value) + TAIL).PIPELINE
        found.append(pipeline.fingerprint(pipeline.variant("v")))
    return found


@pytest.mark.parametrize("what", COUNTS)
def test_what_changes_what_a_stage_does_counts(project: Project, what: str) -> None:
    one, other, again = fingerprints(project, COUNTS[what])
    assert one == again
    assert one != other


@pytest.mark.parametrize("what", DOES_NOT_COUNT)
def test_what_changes_nothing_does_not_count(project: Project, what: str) -> None:
    assert len(set(fingerprints(project, DOES_NOT_COUNT[what]))) == 1


def test_a_script_and_the_same_file_imported_agree_whatever_it_names(project: Project) -> None:
    source = """
import collections, enum, logging
import diffract_dask.runs as dm
log = logging.getLogger(__name__)
class Kind(enum.Enum):
    FAST = 1
names = collections.deque([{'a', 'b', 'c', 'd', 'e'}])
dm.register('v', kind=Kind.FAST)
def f(ctx): log.info(__name__, __file__, names, Kind.FAST)
PIPELINE = dm.Pipeline('p', [dm.Stage('s', f)])
print(PIPELINE.fingerprint(PIPELINE.variant('v')))
"""
    project.write(p=source, deep__p=source)
    root = str(Path(dm.__file__).parents[2])
    found = set()
    for seed, arguments, below in (("1", ["p.py"], "."), ("2", ["-c", "import p"], "."), ("3", ["p.py"], "deep")):
        done = subprocess.run(
            [sys.executable, "-B", *arguments],
            cwd=project.folder / below,
            env={"PYTHONPATH": root, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(done.stdout)
    assert len(found) == 1
