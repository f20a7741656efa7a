"""The primitive of size constants: constants whose value depends on the logical sizes.

    before   a = f32[3]{0.5 1 1.5} at n = 3, f32[4]{...} at n = 4         two programs
    after    a:f32[n] = size_constant[index=0 aval=f32[n] depends_on=n]   one program

The values are arguments of the executable (`SizeConstants`); ``index`` says which one.
"""

from __future__ import annotations

from typing import Any

from jax.extend import core as jex_core

from bucketjit._sizes.expressions import Dim

size_constant_p = jex_core.Primitive("size_constant")


@size_constant_p.def_abstract_eval  # type: ignore[untyped-decorator]
def _abstract_eval(*, index: int, aval: object, depends_on: Dim) -> Any:
    return aval
