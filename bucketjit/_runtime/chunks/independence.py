"""Proves that a call can be split along one axis, and the results of its chunks concatenated.

The proof is for one dimension variable ``v``. It shows for every value in the program:

* A value whose shape does not contain ``v`` does not depend on ``v``, nor on the contents of arrays
  that have an axis of size ``v``.
* A value whose shape contains ``v`` has exactly one such axis. Its size is a multiple of ``v``. Its
  i-th part depends on the i-th parts of arguments, but neither on other parts nor on ``i``.

    b:f32[v,3] = exp a:f32[v,3]                  proven: each row depends on its own row
    c:f32[3] = reduce_sum[axes=(0,)] b           refused: it reduces over v
    d:i32[v] = iota[dimension=0]                 refused: it counts along v, from 0 in each chunk

If the claim holds for the operands of an equation, and the rule of its primitive accepts the
equation, the claim holds for its results. A primitive without a rule is refused. Which of the two
cases a value is, its shape says, so the walk keeps no other state: a rule looks at one equation.

`independence_rules` has the rules, `independence_walk` the walk over the program.
"""

from __future__ import annotations

from bucketjit._runtime.chunks.independence_rules import CONTROL, RULES, SHOWN
from bucketjit._runtime.chunks.independence_walk import Axis, Proof, Rules
from bucketjit._tracing.program import Program


def split_axes(program: Program, variable: str) -> tuple[Axis, ...]:
    """The axes along which the results of chunks are joined.

    The size constants of the program must be the same for each chunk as for the whole call. That is
    not checked here, but by `Splitter`.

    Args:
        program: The program.
        variable: The dimension variable that the chunks are cut along.

    Returns:
        For each output the axis to concatenate chunks along; None if every chunk returns the same.

    Raises:
        MaskingError: It cannot be proven that the outputs are independent along that axis.
    """
    proof = Proof(variable, Rules(RULES, CONTROL, SHOWN))
    proof.whole(program)
    return tuple(proof.axis(shape) for shape in program.out_shapes)
