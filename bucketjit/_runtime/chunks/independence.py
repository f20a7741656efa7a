"""Show of a program that a call may be cut into chunks along an axis, and stitched afterwards.

Said of one dimension variable ``v``, of every value in the program:

* a value whose shape does not name ``v`` is the same whatever ``v`` is and whatever the arrays with
  an axis of ``v`` hold;
* a value whose shape names ``v`` has exactly one such axis. Its size is ``v`` times something, and
  its i-th part depends on the i-th parts of arguments and on nothing else of size ``v``. Nor does
  it depend on i itself.

If that holds of all arguments of an equation and the equation has a rule here that agrees, it
holds of its results. What has no rule is refused. So the shapes of a program are all there is to
keep: the rules look at one equation each, and never let ``v`` in or out by another door.
"""

from __future__ import annotations

from bucketjit._runtime.chunks.independence_rules import CONTROL, RULES, SHOWN
from bucketjit._runtime.chunks.independence_walk import Axis, Proof, Rules
from bucketjit._tracing.program import Program


def split_axes(program: Program, variable: str) -> tuple[Axis, ...]:
    """Where the outputs of a program are put together again, if its calls are cut into chunks.

    Constants of the program that it was given for these sizes (see `SizeConstants`) must be the
    same for each chunk as for the whole, which is not looked at here.

    Args:
        program: The program.
        variable: The dimension variable that the chunks are cut along.

    Returns:
        For each output the axis to concatenate chunks along, or None if every chunk gives the same.

    Raises:
        MaskingError: The program does not show that its outputs are independent along that axis.
    """
    proof = Proof(variable, Rules(RULES, CONTROL, SHOWN))
    proof.whole(program)
    return tuple(proof.axis(shape) for shape in program.out_shapes)
