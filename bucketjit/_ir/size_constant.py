"""The primitive that stands for a constant that differs from one logical size to another."""

from __future__ import annotations

from typing import Any

from jax.extend import core as jex_core

from bucketjit._sizes.expressions import Dim

size_constant_p = jex_core.Primitive("size_constant")


@size_constant_p.def_abstract_eval  # type: ignore[untyped-decorator]
def _abstract_eval(*, index: int, aval: object, depends_on: Dim) -> Any:
    return aval
