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

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax

from bucketjit import _jax
from bucketjit._errors import MaskingError, first_line, is_of_machine
from bucketjit._ir.associative_scan import PRIMAL, associative_scan_p
from bucketjit._ir.opaque import looked_inside
from bucketjit._ir.primitive_facts import ELEMENTWISE
from bucketjit._sizes.expressions import Dim, Shape, is_multiple, is_symbolic, variables_of
from bucketjit._sizes.reshape_groups import groups, without_ones
from bucketjit._tracing.skeleton import leaked_p
from bucketjit._tracing.symbolic import Program

# Parameters whose sizes are those of the operands or results, or that a rule looks at one by one.
# A size in any other one is refused: ``x[:, n - 2 : n]`` has the shape of ``x[:, :2]``.
_SHOWN: Mapping[str, frozenset[str]] = {
    "broadcast_in_dim": frozenset({"shape"}),
    "iota": frozenset({"shape"}),
    "full": frozenset({"shape"}),
    "empty": frozenset({"shape"}),
    "reshape": frozenset({"new_sizes"}),
    "dynamic_slice": frozenset({"slice_sizes"}),
    "gather": frozenset({"slice_sizes"}),
    "slice": frozenset({"limit_indices"}),
    "tile": frozenset({"reps"}),
}

Axis = int | None  # where a value has its axis of the variable's size; None if it has none


def split_axes(program: Program, variable: str) -> tuple[Axis, ...]:
    """Where the outputs of a program are put together again, if its calls are cut into chunks.

    Constants of the program that it was given for these sizes (see `Leaks`) must be the same for
    each chunk as for the whole, which is not looked at here.

    Args:
        program: The program.
        variable: The dimension variable that the chunks are cut along.

    Returns:
        For each output the axis to concatenate chunks along, or None if every chunk gives the same.

    Raises:
        MaskingError: The program does not show that its outputs are independent along that axis.
    """
    proof = _Proof(variable)
    proof.whole(program)
    return tuple(proof.axis(shape) for shape in program.out_shapes)


class _Refusal(MaskingError):
    """An equation that breaks the rules, and the user's line that made it."""

    def __init__(self, reason: str, remedy: str, line: str) -> None:
        super().__init__(reason, remedy)
        self.line = line


class _Proof:
    """The walk over a program."""

    def __init__(self, variable: str) -> None:
        self.variable = variable
        self._mentions: dict[int, tuple[Any, bool]] = {}
        self._looking_inside: list[Any] = []

    def whole(self, program: Program) -> None:
        v = self.variable
        if program.jaxpr.effects:
            what = _jax.first_effect(program.jaxpr)
            raise MaskingError(
                "it has effects (io_callback, debug.print) or references that it writes to, which "
                f"chunks would repeat: {what}",
                "leave the effect out, or return what it tells",
            )
        if program.found:
            raise MaskingError(f"it has sizes that are no expression of {v}: {program.found[0]}")
        for what, shapes in (("argument", program.in_shapes), ("output", program.out_shapes)):
            for i, shape in enumerate(shapes):
                try:
                    self.axis(shape)
                except MaskingError as error:
                    raise MaskingError(f"{what} {i}: {error.reason}", error.remedy) from None
        try:
            self.check(program.jaxpr)
        except _Refusal as error:
            where = f" [{error.line}]" if error.line else ""
            raise MaskingError(error.reason + where, error.remedy) from None

    # --- what names the variable ---

    def _named(self, dim: Dim) -> bool:
        return is_symbolic(dim) and self.variable in variables_of(str(dim))

    def axis(self, shape: Shape) -> Axis:
        """The axis of the variable's size.

        Raises:
            MaskingError: There are several, or it has another size, such as ``b + 1``.
        """
        named = [i for i, d in enumerate(shape) if self._named(d)]
        if not named:
            return None
        shown = ", ".join(map(str, shape))
        if len(named) > 1:
            raise MaskingError(f"an array of shape ({shown}) has {self.variable} along two axes")
        if not is_multiple(str(shape[named[0]]), self.variable):
            raise MaskingError(
                f"an array of shape ({shown}) has an axis that is no multiple of {self.variable}"
            )
        return named[0]

    def mentions(self, value: Any) -> bool:
        """Whether a parameter of an equation names the variable, at any depth."""
        if is_symbolic(value):
            return self._named(value)
        if value is None or isinstance(value, bool | int | float | complex | str):
            return False
        if _jax.is_jaxpr(value):
            if id(value) not in self._mentions:
                inner = _jax.open_jaxpr(value)[0]
                named = any(map(self._equation_mentions, inner.eqns))
                self._mentions[id(value)] = (value, named)
            return self._mentions[id(value)][1]
        if isinstance(value, tuple | list):
            return any(map(self.mentions, value))
        if isinstance(value, Mapping):
            return any(map(self.mentions, value.values()))
        leaves = jax.tree_util.tree_leaves(value, is_leaf=_jax.is_jaxpr)
        return not (len(leaves) == 1 and leaves[0] is value) and any(map(self.mentions, leaves))

    def _equation_mentions(self, eqn: Any) -> bool:
        shapes = (getattr(v.aval, "shape", ()) for v in (*eqn.invars, *eqn.outvars))
        return any(self._named(d) for shape in shapes for d in shape) or any(
            map(self.mentions, eqn.params.values())
        )

    # --- the walk ---

    def check(self, jaxpr: Any) -> None:
        """Hold every equation of an open jaxpr to the rules.

        Raises:
            MaskingError: One of them breaks them, or has no rule.
        """
        for eqn in jaxpr.eqns:
            if self._equation_mentions(eqn):
                self._equation(eqn)

    def inside(self, jaxpr: Any) -> None:
        """The same for a jaxpr among the parameters of an equation."""
        self.check(_jax.open_jaxpr(jaxpr)[0])

    def _equation(self, eqn: Any) -> None:
        try:
            step = _Step(self, eqn)
            if (control := _CONTROL.get(eqn.primitive)) is not None:
                control(step)
                return
            rule = _RULES.get(eqn.primitive)
            if rule is None:
                self.look_inside(eqn)
                return
            rule(step)
            shown = _SHOWN.get(_jax.name_of(eqn), ())
            for param, value in eqn.params.items():
                if param not in shown and self.mentions(value):
                    step.refuse(f"its parameter {param} depends on {self.variable}")
        except _Refusal as error:  # of an inner equation
            raise _Refusal(
                error.reason, error.remedy, error.line or _jax.source_line(eqn)
            ) from None
        except MaskingError as error:
            reason = f"{eqn.primitive.name}: {error.reason}"
            raise _Refusal(reason, error.remedy, _jax.source_line(eqn)) from None

    def look_inside(self, eqn: Any) -> None:
        """The same for the implementation of an equation that has no rule.

        Raises:
            MaskingError: It breaks the rules, or cannot be looked into.
        """
        if any(p is eqn.primitive for p in self._looking_inside):
            raise MaskingError(f"nothing is known of what it does along {self.variable}")
        try:
            inner, _ = looked_inside(eqn)
        except MaskingError:
            raise MaskingError(f"nothing is known of what it does along {self.variable}") from None
        self._looking_inside.append(eqn.primitive)
        try:
            self.check(inner)
        finally:
            self._looking_inside.pop()


class _Step:
    """One equation.

    Attributes:
        proof: The walk.
        variable: The dimension variable.
        eqn, params: The equation.
        in_shapes, out_shapes: Shapes of operands and results.
        ins, outs: Where they have the axis of the variable's size.
    """

    def __init__(self, proof: _Proof, eqn: Any) -> None:
        self.proof = proof
        self.variable = proof.variable
        self.eqn = eqn
        self.params = eqn.params
        self.in_shapes = [tuple(getattr(v.aval, "shape", ())) for v in eqn.invars]
        self.out_shapes = [tuple(getattr(v.aval, "shape", ())) for v in eqn.outvars]
        self.ins = list(map(proof.axis, self.in_shapes))
        self.outs = list(map(proof.axis, self.out_shapes))

    def refuse(self, why: str, remedy: str = "") -> NoReturn:
        """Say that this equation does not keep the parts apart."""
        raise MaskingError(why, remedy)

    def same_size(self, before: Dim, after: Dim) -> bool:
        """Whether two sizes are the same expression."""
        return str(before) == str(after)

    def aligned(self) -> int:
        """The one axis that all operands and results have the variable at.

        Operands without it may have size 1 there, or no axes at all.
        """
        found = {axis for axis in (*self.ins, *self.outs) if axis is not None}
        if len(found) != 1:
            self.refuse(f"it has {self.variable} along different axes")
        (axis,) = found
        size = next(
            shape[axis]
            for shape, own in zip(
                [*self.in_shapes, *self.out_shapes], [*self.ins, *self.outs], strict=True
            )
            if own is not None
        )
        for shape, own in zip(self.in_shapes, self.ins, strict=True):
            if own is None and shape and not (axis < len(shape) and shape[axis] == 1):
                self.refuse(f"an operand of shape {shape} meets each part along {self.variable}")
            if own is not None and not self.same_size(shape[own], size):
                self.refuse(f"it has sizes {shape[own]} and {size} along one axis")
        for shape, own in zip(self.out_shapes, self.outs, strict=True):
            if own is None or not self.same_size(shape[own], size):
                self.refuse(f"a result of shape {shape} puts parts along {self.variable} together")
        return axis


_Rule = Callable[[_Step], object]

_REDUCE_OUTSIDE = "return a value for each position, and put them together outside"


def _by_shape(step: _Step) -> None:
    """The results hold what the operands hold, in the order that the shapes tell."""


def _elementwise(step: _Step) -> None:
    step.aligned()


def _along_others(
    axes: Callable[[_Step, int], bool], what: str, remedy: str = _REDUCE_OUTSIDE
) -> _Rule:
    """Something along axes of the first operand, which must be others.

    Args:
        axes: Whether it is along an axis.
        what: What it does there, in words.
        remedy: What to do about it.
    """

    def rule(step: _Step) -> None:
        named = {axis for axis in step.ins if axis is not None}
        if len(named) != 1:
            step.refuse(f"it has {step.variable} along different axes")
        (axis,) = named
        if axes(step, axis):
            step.refuse(f"{what} {step.variable}", remedy)

    return rule


def _in(param: str) -> Callable[[_Step, int], bool]:
    return lambda step, axis: axis in step.params[param]


def _is(param: str) -> Callable[[_Step, int], bool]:
    return lambda step, axis: axis == step.params[param]


def _broadcast(step: _Step) -> None:
    axis, out = step.ins[0], step.outs[0]
    if axis is None or out is None:
        return  # the same for each part
    places, shape = step.params["broadcast_dimensions"], step.out_shapes[0]
    if places[axis] != out or not step.same_size(step.in_shapes[0][axis], shape[out]):
        step.refuse(f"it repeats what is along {step.variable}")


def _iota(step: _Step) -> None:
    if step.outs[0] == step.params["dimension"]:
        step.refuse(
            f"it counts along {step.variable}, from 0 in each chunk",
            "pass the positions as an argument, or index by jnp.take_along_axis or jax.vmap",
        )


def _reshape(step: _Step) -> None:
    if step.params.get("dimensions") is not None:
        step.refuse("it permutes axes")
    for before, after in groups(without_ones(step.in_shapes[0]), without_ones(step.out_shapes[0])):
        if not step.proof.mentions((before, after)):
            continue
        # Where the variable comes first in a group, its parts are blocks of the merged axes.
        first = before and after and all(map(step.proof.mentions, (before[0], after[0])))
        if not first or not step.same_size(math.prod(before), math.prod(after)):
            step.refuse(f"it mixes {step.variable} with an axis before it")


def _concatenate(step: _Step) -> None:
    if step.aligned() == step.params["dimension"]:
        step.refuse(f"it joins arrays along {step.variable}")


def _uncut(step: _Step) -> int:
    """The axis of the first operand, which the result has in full at the same place."""
    axis = step.ins[0]
    if axis is None or axis != step.outs[0]:
        step.refuse(f"it takes part of what is along {step.variable}")
    if not step.same_size(step.in_shapes[0][axis], step.out_shapes[0][axis]):
        step.refuse(f"it changes how much there is along {step.variable}")
    return axis


def _slice(step: _Step) -> None:
    axis = _uncut(step)
    strides = step.params["strides"]
    if step.params["start_indices"][axis] != 0 or (strides is not None and strides[axis] != 1):
        step.refuse(f"it takes part of what is along {step.variable}")
    limits = step.params["limit_indices"]
    if any(step.proof.mentions(d) for i, d in enumerate(limits) if i != axis):
        step.refuse(f"it takes a part that depends on {step.variable}")


def _pad(step: _Step) -> None:
    axis = _uncut(step)
    if tuple(step.params["padding_config"][axis]) != (0, 0, 0) or step.in_shapes[1]:
        step.refuse(f"it adds to what is along {step.variable}")


def _dynamic_slice(step: _Step) -> None:
    _uncut(step)  # a start is clamped to 0 where all is taken
    if any(axis is not None for axis in step.ins[1:]):
        step.refuse(f"its start depends on {step.variable}")


def _dynamic_update_slice(step: _Step) -> None:
    axis = _uncut(step)
    update = step.in_shapes[1]
    if step.ins[1] != axis or not step.same_size(update[axis], step.in_shapes[0][axis]):
        step.refuse(f"it writes to positions along {step.variable}")
    if any(own is not None for own in step.ins[2:]):
        step.refuse(f"its start depends on {step.variable}")


def _split(step: _Step) -> None:
    if step.aligned() == step.params["axis"]:
        step.refuse(f"it takes what is along {step.variable} apart")


def _tile(step: _Step) -> None:
    if step.ins[0] is not None and step.params["reps"][step.ins[0]] != 1:
        step.refuse(f"it repeats what is along {step.variable}")


def _dot_general(step: _Step) -> None:
    contracted, batched = step.params["dimension_numbers"]
    for axis, axes in zip(step.ins, contracted, strict=False):
        if axis in axes:
            step.refuse(f"it adds up products along {step.variable}", _REDUCE_OUTSIDE)
    left, right = step.ins[:2]
    if left is not None and right is not None:
        pairs = zip(*batched, strict=True)
        if (left, right) not in pairs:
            step.refuse(f"it multiplies each part along {step.variable} by every other")


def _conv(step: _Step) -> None:
    numbers = step.params["dimension_numbers"]
    if step.ins[1] is not None or step.ins[0] != numbers.lhs_spec[0]:
        step.refuse(f"{step.variable} is not its batch axis")
    if step.params["batch_group_count"] != 1 or step.outs[0] != numbers.out_spec[0]:
        step.refuse(f"it groups its batch axis, which is {step.variable}")


_INDEX = "use jnp.take_along_axis, or jax.vmap of a function of one row"


def _gather(step: _Step) -> None:
    numbers = step.params["dimension_numbers"]
    operand, indices = step.in_shapes
    own, at = step.ins
    out = step.outs[0]
    windows = sorted(numbers.offset_dims)
    batch = [i for i in range(len(step.out_shapes[0])) if i not in windows]
    if at is not None and at >= len(indices) - 1:
        step.refuse(f"an index is spread along {step.variable}")
    if own is None and at is not None:
        expected = batch[at]
    elif own is not None and at is not None:
        paired = zip(
            numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
        )
        if (own, at) not in paired:
            step.refuse(f"each part along {step.variable} may read every other", _INDEX)
        expected = batch[at]
    elif own is not None:
        dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        size = step.params["slice_sizes"][own]
        if own in dropped or own in numbers.start_index_map:
            step.refuse(f"it reads positions along {step.variable}", _INDEX)
        if not step.same_size(size, operand[own]):
            step.refuse(f"it takes part of what is along {step.variable}")
        expected = windows[[i for i in range(len(operand)) if i not in dropped].index(own)]
    else:
        step.refuse(f"its slices have sizes that depend on {step.variable}")
    if out != expected:
        step.refuse(f"it moves {step.variable}")


def _scatter(step: _Step) -> None:
    numbers = step.params["dimension_numbers"]
    operand, indices, updates = step.in_shapes
    own, at, new = step.ins
    windows = sorted(numbers.update_window_dims)
    batch = [i for i in range(len(updates)) if i not in windows]
    if own is None:
        step.refuse(f"what comes along {step.variable} goes to the same array", _REDUCE_OUTSIDE)
    if at is not None:
        paired = zip(
            numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
        )
        if (own, at) not in paired or at >= len(indices) - 1:
            step.refuse(f"each part along {step.variable} may write to every other", _INDEX)
        expected = batch[at]
    else:
        dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        if own in dropped or own in numbers.scatter_dims_to_operand_dims:
            step.refuse(f"it writes to positions along {step.variable}", _INDEX)
        expected = windows[[i for i in range(len(operand)) if i not in dropped].index(own)]
    if new != expected or not step.same_size(updates[expected], operand[own]):
        step.refuse(f"its updates are not those of each part along {step.variable}")
    if step.outs[0] != own:
        step.refuse(f"it moves {step.variable}")


def _windows(step: _Step) -> None:
    axis, params = step.aligned(), step.params
    ones = [
        params[name][axis]
        for name in ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
        if params.get(name) is not None
    ]
    if any(n != 1 for n in ones) or tuple(params["padding"][axis]) != (0, 0):
        step.refuse(f"its windows slide along {step.variable}")


def _matrices(step: _Step) -> None:
    axis = step.aligned()
    if axis >= len(step.in_shapes[0]) - 2:
        step.refuse(f"{step.variable} is an axis of its matrices")


def _keys_of(*generators: str) -> Callable[[_Rule], _Rule]:
    """A rule for keys of these generators; others may use one key of a batch for all of it."""

    def held_to(rule: _Rule) -> _Rule:
        def checked(step: _Step) -> None:
            keys = step.eqn.invars[0].aval.dtype
            if _jax.key_impl(keys) not in generators:
                step.refuse(
                    f"keys of {keys} are not known to be used one by one, and each chunk might "
                    "draw others",
                    "use keys of JAX's default generator (threefry2x32)",
                )
            rule(step)

        return checked

    return held_to


_drawing, _deriving = _keys_of("threefry2x32"), _keys_of("threefry2x32", "rbg")


def _drawn(step: _Step) -> None:
    if step.ins[0] is None or step.proof.mentions(step.params["shape"]):
        step.refuse(
            f"one key is used for all of {step.variable}, and each chunk would draw the same",
            f"pass a key for each position along {step.variable}, and draw by jax.vmap",
        )


def _dim_as_value(step: _Step) -> None:
    step.refuse(f"the size {step.params['dim']} is used as a number", _REDUCE_OUTSIDE)


def _leaked(step: _Step) -> None:
    """A constant that depends on some size; what it is at these sizes is for others to compare."""
    if step.outs[0] is not None:
        step.refuse(f"a constant of the program has {step.variable} along an axis")


# --- sub-programs ---------------------------------------------------------------------------


def _call(step: _Step) -> None:
    step.proof.inside(_jax.called_jaxpr(step.params))


def _cond(step: _Step) -> None:
    if step.ins[0] is not None:
        step.refuse(f"its branch is chosen along {step.variable}")
    for branch in step.params["branches"]:
        step.proof.inside(branch)


def _while(step: _Step) -> None:
    """A predicate with rows lets each row go on by itself: rows are the leading axes."""
    condition, body = step.params["cond_jaxpr"], step.params["body_jaxpr"]
    rows = step.proof.axis(_jax.open_jaxpr(condition)[0].outvars[0].aval.shape)
    carried = step.ins[step.params["cond_nconsts"] + step.params["body_nconsts"] :]
    if rows is not None and any(axis != rows for axis in carried):
        step.refuse(f"it goes on for as long as some part along {step.variable} does")
    step.proof.inside(condition)
    step.proof.inside(body)


def _scan(step: _Step) -> None:
    if step.proof.mentions(step.params["length"]):
        consts, carried = _jax.scan_arity(step.params)
        if carried:
            step.refuse(f"it carries values from step to step along {step.variable}")
        if any(axis is not None for axis in step.ins[:consts]):
            step.refuse(f"each step along {step.variable} may read every other")
        if any(axis != 0 for axis in (*step.ins[consts:], *step.outs)):
            step.refuse(f"it does not step along {step.variable}")
    step.proof.inside(step.params["jaxpr"])


def _linear_solve(step: _Step) -> None:
    step.proof.inside(step.params["jaxprs"].solve)


def _hi_primitive(step: _Step) -> None:
    try:
        avals = [v.aval for v in step.eqn.invars]
        expanded = _jax.expand_hi_primitive(step.params["_prim"], avals)
    except Exception as error:
        if is_of_machine(error):
            raise
        step.refuse(f"it does not expand at symbolic sizes: {first_line(error)}")
    step.proof.inside(expanded)


def _associative_scan(step: _Step) -> None:
    combine = step.params["combine"]
    if step.params["mode"] != PRIMAL:
        step.refuse("nothing is known of its derivatives")
    consts, elems = step.ins[: combine.num_consts], step.ins[combine.num_consts :]
    if any(axis is not None for axis in consts) or any(axis == combine.axis for axis in elems):
        step.refuse(f"it combines what is along {step.variable}", _REDUCE_OUTSIDE)
    step.proof.inside(combine.jaxpr)


# --- the tables -----------------------------------------------------------------------------


def _table(rules: Mapping[str, _Rule]) -> dict[Any, _Rule]:
    return {p: rule for name, rule in rules.items() for p in _jax.primitives(*name.split())}


_reduction = _along_others(_in("axes"), "it reduces over")
_cumulative = _along_others(_is("axis"), "it accumulates along")

_RULES: dict[Any, _Rule] = _table(
    {
        " ".join(ELEMENTWISE): _elementwise,
        "threefry2x32 threefry4x32 philox2x32 philox4x32": _elementwise,
        "bitcast_convert_type random_wrap random_unwrap random_seed random_clone": _elementwise,
        "name device_put sharding_constraint reshard layout_constraint": _by_shape,
        "transpose squeeze": _by_shape,
        "optimization_barrier full empty": _by_shape,
        "broadcast_in_dim": _broadcast,
        "iota": _iota,
        "reshape": _reshape,
        "concatenate": _concatenate,
        "slice": _slice,
        "pad": _pad,
        "dynamic_slice": _dynamic_slice,
        "dynamic_update_slice": _dynamic_update_slice,
        "split": _split,
        "stack": _by_shape,
        "unstack": _along_others(_is("axis"), "it takes apart what is along"),
        "tile": _tile,
        "rev": _along_others(_in("dimensions"), "it reverses"),
        "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor": _reduction,
        "argmax argmin": _reduction,
        "reduce": _along_others(_in("dimensions"), "it reduces over"),
        "cumsum cumprod cummax cummin cumlogsumexp": _cumulative,
        "sort": _along_others(_is("dimension"), "it sorts along"),
        "top_k": _along_others(
            lambda step, axis: axis == step.params.get("axis", len(step.in_shapes[0]) - 1),
            "it sorts along",
        ),
        "approx_top_k": _along_others(_is("reduction_dimension"), "it sorts along"),
        "dot_general": _dot_general,
        "conv_general_dilated": _conv,
        "gather": _gather,
        "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max": _scatter,
        "reduce_window reduce_window_sum reduce_window_max reduce_window_min": _windows,
        "select_and_gather_add select_and_scatter_add select_and_scatter": _windows,
        "fft": _along_others(
            lambda step, axis: (
                axis >= len(step.in_shapes[0]) - len(tuple(step.params["fft_lengths"]))
            ),
            "it transforms along",
        ),
        "cholesky triangular_solve lu qr geqrf householder_product eigh svd": _matrices,
        "random_bits": _drawing(_drawn),
        # On an accelerator it draws for a batch of keys at once.
        "random_gamma": _drawing(lambda step: step.proof.look_inside(step.eqn)),
        "random_split": _deriving(_drawn),
        "random_fold_in": _deriving(_elementwise),
        "dim_as_value": _dim_as_value,
    }
)

_CONTROL: dict[Any, _Rule] = _table(
    {
        "jit pjit call closed_call core_call eval_jaxpr composite": _call,
        "custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call": _call,
        "linear_call remat_opt remat2 checkpoint": _call,
        "cond": _cond,
        "while": _while,
        "scan": _scan,
        "custom_linear_solve": _linear_solve,
        "call_hi_primitive": _hi_primitive,
    }
) | {associative_scan_p: _associative_scan, leaked_p: _leaked}
