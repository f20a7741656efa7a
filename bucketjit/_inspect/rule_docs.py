"""Describes how a masking rule masks, by the first paragraph of its docstring.

A rule is often made by a function (``reduction(identity)``) or by `functools.partial`. So the
docstrings of its maker and of the functions that it closes over are used too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any


def how(rule: Callable[..., Any]) -> str:
    """What a rule does, in words."""
    text = first_paragraph(rule.__doc__) or first_paragraph(maker_of(rule).__doc__)
    made_with = [first_paragraph(f.__doc__) for f in functions_in(closure_of(rule).values())]
    return " ".join(dict.fromkeys([text, *filter(None, made_with)]))


def closure_of(rule: object) -> dict[str, Any]:
    """The values that a rule was made with, by name: keywords of a partial, and closure cells."""
    if isinstance(rule, functools.partial):
        return {**closure_of(rule.func), **rule.keywords}
    if not isinstance(rule, FunctionType):
        return {}
    names = rule.__code__.co_freevars
    cells = [c.cell_contents for c in rule.__closure__ or ()]
    return dict(zip(names, cells, strict=True))


def first_paragraph(text: str | None) -> str:
    """The first paragraph of a docstring, as one line."""
    return " ".join((text or "").strip().split("\n\n")[0].split())


def functions_in(values: Any) -> Iterator[FunctionType]:
    """The functions of bucketjit among some values, and in tuples and lists among them."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from functions_in(value)
        elif isinstance(value, FunctionType) and value.__module__.startswith("bucketjit."):
            yield value


def maker_of(rule: object) -> Any:
    """The function at the top level of a module that made a rule; the rule itself if it is one."""
    if isinstance(rule, functools.partial):
        return maker_of(rule.func)
    if not isinstance(rule, FunctionType):
        return rule
    return rule.__globals__.get(rule.__qualname__.split(".")[0], rule)
