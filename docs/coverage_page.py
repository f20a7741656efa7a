"""Write ``docs/coverage.md``: ``python -m docs.coverage_page``.

The page is made from the rule tables, the docstrings and refusals of their rules, and the
cases. It is the same whichever JAX is installed: primitives that this JAX lacks get a stand-in,
so that the tables hold every name, and keep the row that a JAX which has them wrote.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from bucketjit._jax import jaxprs
from bucketjit._masking.rules import FAMILIES
from bucketjit._masking.rules.refused import REFUSED
from bucketjit._stages import explain
from bucketjit._stages.explain import maker_of
from tests.harness import Case
from tests.test_cases import CASES

PAGE = Path(__file__).parent / "coverage.md"
SHOWN_CASES = 3
COMPILED = PAGE.parent.parent / "benchmarks" / "results" / "cases.json"
TARGETS = {"tpu": "TPU", "cuda": "GPU"}
ALL_CASES = sorted(CASES, key=lambda case: case.name)

#: Keys of the rule table that no case covers, and why.
UNCOVERED = {
    "all_gather_invariant": "no public function makes it",
    "call": "no function of JAX's makes it any more",
    "eval_jaxpr": "before 0.12 it is traced as `closed_call`",
    "with_memory_space_constraint": "made in Pallas kernels only, which are refused",
}

#: What `RuleContext.require_equal` refuses.
UNEQUAL = "an axis of size ... meets one of size ..., which it must equal"

_HEAD = """\
# What is masked

Primitive by primitive: how bucketjit masks it, which axes may be open, and what it refuses. A
call that meets a refusal runs at its exact shape, warns once with that reason and is counted
(`fallback="exact"`), or raises it (`fallback="error"`).

*Open axes* are those that the tests open: *first* is axis 0 of an argument (the batch), *inner*
any later axis (sequence, height, features), *both* two variables at once. Unless a refusal
speaks of an axis, any axis may be open. Equations that meet no open axis run as they are,
whatever their primitive. A primitive that stands nowhere here has no rule: it is refused, and
`.with_rules({primitive: rule})` adds one.

*Compiled for*: the compilers of a TPU v5e and of an H100 took a masked program of such a case, on a
machine that has neither ([TPUs and GPUs](accelerators.md)).

<!-- Made by `make coverage-page` from the rule tables and the test cases: do not edit. -->
"""


# --- rule tables ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One primitive of a family's table."""

    name: str
    family: str
    rule: Callable[..., Any]


def entries(family: str) -> list[Entry]:
    """Every primitive of a family, those that this JAX lacks included."""
    table = importlib.import_module(f"bucketjit._masking.rules.{family}").TABLE
    return [
        Entry(key if isinstance(key, str) else key.name, family, rule)
        for key, rule in table.items()
    ]


@functools.cache
def keys() -> frozenset[str]:
    """Names of all primitives with a rule that may mask them."""
    return frozenset(e.name for f in FAMILIES if f != "refused" for e in entries(f))


def keys_here() -> set[str]:
    """Those that this JAX has."""
    return {name for name in keys() if jaxprs.primitive(name) is not None}


# --- what a rule refuses ----------------------------------------------------------------------


@functools.cache
def _definitions(module: ModuleType) -> dict[str, ast.AST]:
    tree = ast.parse(inspect.getsource(module))
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name: node for node in tree.body if isinstance(node, kinds)}


def _text(node: ast.expr, known: dict[str, Any]) -> str:
    """The text of a message, what is known only later shown as an ellipsis."""
    match node:
        case ast.Constant(value=str() as value):
            return value
        case ast.JoinedStr(values=values):
            return "".join(_text(v, known) for v in values)
        case ast.FormattedValue(value=ast.Name(id=name)) | ast.Name(id=name):
            return known[name] if isinstance(known.get(name), str) else "..."
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, known) + _text(right, known)
    return "..."


def _reachable(module: ModuleType, name: str, seen: set[tuple[str, str]]) -> Iterator[ast.AST]:
    """The definition of a name, and of every rule-side name it uses."""
    node = _definitions(module).get(name)
    if node is None or (module.__name__, name) in seen:
        return
    seen.add((module.__name__, name))
    yield node
    for used in {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}:
        value = getattr(module, used, None)
        home = getattr(value, "__module__", None) or ""
        if home.startswith("bucketjit._masking.rules") and home in sys.modules:
            yield from _reachable(sys.modules[home], getattr(value, "__name__", used), seen)


def closure_of(rule: object) -> dict[str, Any]:
    """The values that a rule was made with, by name."""
    if not isinstance(rule, FunctionType):
        return {}
    cells = [c.cell_contents for c in rule.__closure__ or ()]
    return dict(zip(rule.__code__.co_freevars, cells, strict=True))


def functions_in(values: Any) -> Iterator[FunctionType]:
    """The functions of bucketjit among some values, and in tuples and lists among them."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from functions_in(value)
        elif isinstance(value, FunctionType) and value.__module__.startswith("bucketjit."):
            yield value


def how(rule: Callable[..., Any]) -> str:
    """What a rule does, and the functions that it was made with."""
    made_with = [explain.how(f) for f in functions_in(closure_of(rule).values())]
    return " ".join(dict.fromkeys([explain.how(rule), *filter(None, made_with)]))


def refusals(rule: Callable[..., Any]) -> list[str]:
    """The reasons for which a rule refuses."""
    maker, known = maker_of(rule), closure_of(rule)
    makers = [maker, *functions_in(known.values())]
    found: dict[str, None] = {}
    seen: set[tuple[str, str]] = set()
    for function in makers:
        module = sys.modules.get(function.__module__)
        if module is None:
            continue
        for node in _reachable(module, function.__name__, seen):
            for call in ast.walk(node):
                match call:
                    case ast.Call(func=ast.Attribute(attr="refuse"), args=[reason, *_]):
                        found[_text(reason, known)] = None
                    case ast.Call(func=ast.Attribute(attr="require_equal")):
                        found[UNEQUAL] = None
    return sorted(found)


# --- cases ------------------------------------------------------------------------------------


@functools.cache
def cases_of(primitive: str) -> tuple[Case, ...]:
    """The cases that cover a primitive."""
    return tuple(c for c in ALL_CASES if primitive in c.covers)


def _opened(case: Case) -> set[str]:
    found = set()
    for arg in case.arguments:
        first, inner = arg.sizes[:1], arg.sizes[1:]
        found |= {"first"} if any(not t.isdigit() for t in first) else set()
        found |= {"inner"} if any(not t.isdigit() for t in inner) else set()
    return found | ({"both"} if len(case.variables) > 1 else set())


def _row(primitive: str) -> str:
    written = _rows_as_written().get(primitive, "")
    if not cases_of(primitive) and written.count("`") > 2:
        return written  # by a JAX that has this primitive
    axes, cases = _cells(primitive)
    targets = [name for key, name in TARGETS.items() if primitive in compiled()[key]["primitives"]]
    return f"| `{primitive}` | {axes} | {cases} | {', '.join(targets)} |"


@functools.cache
def compiled() -> Any:
    """What the compilers of TPUs and GPUs took, by ``make accelerator-compilers``."""
    return json.loads(COMPILED.read_text())


@functools.cache
def _rows_as_written() -> dict[str, str]:
    lines = PAGE.read_text().splitlines() if PAGE.exists() else []
    return {line.split("`")[1]: line for line in lines if line.startswith("| `")}


def _cells(primitive: str) -> tuple[str, str]:
    cases = cases_of(primitive)
    if not cases:
        return "", f"*{UNCOVERED.get(primitive, 'none')}*"
    opened = set().union(*map(_opened, cases))
    shown = ", ".join(f"`{c.name}`" for c in cases[:SHOWN_CASES])
    more = len(cases) - SHOWN_CASES
    axes = [k for k in ("first", "inner", "both") if k in opened]
    return ", ".join(axes), shown + (f" and {more} more" if more > 0 else "")


# --- the page ---------------------------------------------------------------------------------


def _family_section(family: str) -> Iterator[str]:
    module = importlib.import_module(f"bucketjit._masking.rules.{family}")
    yield f"\n## {family.capitalize()}\n"
    yield f"{explain.how(module)}\n"
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for entry in entries(family):
        kind = how(entry.rule), tuple(refusals(entry.rule))
        groups.setdefault(kind, []).append(entry.name)
    for (text, refused), names in groups.items():
        many = f"{len(names)} primitives, from `{min(names)}` to `{max(names)}`"
        few = ", ".join(f"`{n}`" for n in sorted(names))
        yield f"\n### {few if len(names) <= 8 else many}\n"
        yield f"{text}\n"
        if refused:
            yield "Refused:\n"
            yield from (f"* {reason}" for reason in refused)
            yield ""
        yield "| primitive | open axes | cases | compiled for |\n| --- | --- | --- | --- |"
        yield from map(_row, sorted(names))


def _refused_section() -> Iterator[str]:
    yield "\n## Refused\n"
    yield "These are never masked where they meet an open axis.\n"
    yield "| primitives | why | what to do |\n| --- | --- | --- |"
    for names, reason, remedy in REFUSED:
        yield f"| {', '.join(f'`{n}`' for n in names)} | {reason} | {remedy} |"


def page() -> str:
    """The text of the page."""
    lines = [_HEAD]
    for family in FAMILIES:
        if family != "refused":
            lines += _family_section(family)
    lines += _refused_section()
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
