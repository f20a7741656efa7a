"""The rules of the independence proof, by primitive; `independence` says what they prove.

A rule gets a `Step`, which is one equation. It returns if the results keep to the claim, and else
calls `Step.refuse`. ``RULES`` has the rules of plain primitives, ``CONTROL`` those of primitives
that hold programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from bucketjit._ir.associative_scan import PRIMAL, associative_scan_p
from bucketjit._ir.primitive_facts import ELEMENTWISE
from bucketjit._ir.size_constant import size_constant_p
from bucketjit._jax.arrays import key_impl
from bucketjit._jax.jaxprs import dtype_of, expand_hi_primitive, open_jaxpr, scan_arity, shape_of
from bucketjit._jax.primitives import called_jaxpr, primitives
from bucketjit._raised import first_line, is_of_machine
from bucketjit._runtime.chunks.independence_walk import Rule, Step
from bucketjit._sizes.reshape_groups import groups, without_ones

# Parameters that may contain the variable: they repeat sizes of operands or results, or the rule
# checks them. The variable in any other parameter is refused: ``x[:, n - 2 : n]`` has the shape of
# ``x[:, :2]``, so shapes alone do not show it.
SHOWN: Mapping[str, frozenset[str]] = {
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


_REDUCE_OUTSIDE = "return a value for each position, and put them together outside"


def _by_shape(step: Step) -> None:
    """Accept: the results have the elements of the operands, so shapes show where the axis is."""


def _elementwise(step: Step) -> None:
    step.aligned()


def _along_others(
    axes: Callable[[Step, int], bool], what: str, remedy: str = _REDUCE_OUTSIDE
) -> Rule:
    """A rule for primitives that combine elements along axes, which must not be the variable's.

    Args:
        axes: Whether the equation combines elements along an axis.
        what: What it does there, in words.
        remedy: What the user can do instead.
    """

    def rule(step: Step) -> None:
        named = {axis for axis in step.ins if axis is not None}
        if len(named) != 1:
            step.refuse(f"it has {step.variable} along different axes")
        (axis,) = named
        if axes(step, axis):
            step.refuse(f"{what} {step.variable}", remedy)

    return rule


def _in(param: str) -> Callable[[Step, int], bool]:
    return lambda step, axis: axis in step.params[param]


def _is(param: str) -> Callable[[Step, int], bool]:
    return lambda step, axis: axis == step.params[param]


def _broadcast(step: Step) -> None:
    axis, out = step.ins[0], step.outs[0]
    if axis is None or out is None:
        return  # no axis of the variable on one side: a constant, repeated for each part
    places, shape = step.params["broadcast_dimensions"], step.out_shapes[0]
    if places[axis] != out or not step.same_size(step.in_shapes[0][axis], shape[out]):
        step.refuse(f"it repeats what is along {step.variable}")


def _iota(step: Step) -> None:
    if step.outs[0] == step.params["dimension"]:
        step.refuse(
            f"it counts along {step.variable}, from 0 in each chunk",
            "pass the positions as an argument, or index by jnp.take_along_axis or jax.vmap",
        )


def _reshape(step: Step) -> None:
    if step.params.get("dimensions") is not None:
        step.refuse("it permutes axes")
    for before, after in groups(without_ones(step.in_shapes[0]), without_ones(step.out_shapes[0])):
        if not step.proof.mentions((before, after)):
            continue
        # Where the variable comes first in a group, its parts are blocks of the merged axes.
        first = before and after and all(map(step.proof.mentions, (before[0], after[0])))
        if not first or not step.same_size(math.prod(before), math.prod(after)):
            step.refuse(f"it mixes {step.variable} with an axis before it")


def _concatenate(step: Step) -> None:
    if step.aligned() == step.params["dimension"]:
        step.refuse(f"it joins arrays along {step.variable}")


def _uncut(step: Step) -> int:
    """The variable's axis of the first operand; the result must have all of it at that place."""
    axis = step.ins[0]
    if axis is None or axis != step.outs[0]:
        step.refuse(f"it takes part of what is along {step.variable}")
    if not step.same_size(step.in_shapes[0][axis], step.out_shapes[0][axis]):
        step.refuse(f"it changes how much there is along {step.variable}")
    return axis


def _slice(step: Step) -> None:
    axis = _uncut(step)
    strides = step.params["strides"]
    if step.params["start_indices"][axis] != 0 or (strides is not None and strides[axis] != 1):
        step.refuse(f"it takes part of what is along {step.variable}")
    limits = step.params["limit_indices"]
    if any(step.proof.mentions(d) for i, d in enumerate(limits) if i != axis):
        step.refuse(f"it takes a part that depends on {step.variable}")


def _pad(step: Step) -> None:
    axis = _uncut(step)
    if tuple(step.params["padding_config"][axis]) != (0, 0, 0) or step.in_shapes[1]:
        step.refuse(f"it adds to what is along {step.variable}")


def _dynamic_slice(step: Step) -> None:
    _uncut(step)  # a start is clamped to 0 where all is taken
    if any(axis is not None for axis in step.ins[1:]):
        step.refuse(f"its start depends on {step.variable}")


def _dynamic_update_slice(step: Step) -> None:
    axis = _uncut(step)
    update = step.in_shapes[1]
    if step.ins[1] != axis or not step.same_size(update[axis], step.in_shapes[0][axis]):
        step.refuse(f"it writes to positions along {step.variable}")
    if any(own is not None for own in step.ins[2:]):
        step.refuse(f"its start depends on {step.variable}")


def _split(step: Step) -> None:
    if step.aligned() == step.params["axis"]:
        step.refuse(f"it takes what is along {step.variable} apart")


def _tile(step: Step) -> None:
    if step.ins[0] is not None and step.params["reps"][step.ins[0]] != 1:
        step.refuse(f"it repeats what is along {step.variable}")


def _dot_general(step: Step) -> None:
    contracted, batched = step.params["dimension_numbers"]
    for axis, axes in zip(step.ins, contracted, strict=False):
        if axis in axes:
            step.refuse(f"it adds up products along {step.variable}", _REDUCE_OUTSIDE)
    # With the variable in both operands, it must be a batch dimension: part i meets part i only.
    left, right = step.ins[:2]
    if left is not None and right is not None:
        pairs = zip(*batched, strict=True)
        if (left, right) not in pairs:
            step.refuse(f"it multiplies each part along {step.variable} by every other")


def _conv(step: Step) -> None:
    numbers = step.params["dimension_numbers"]
    if step.ins[1] is not None or step.ins[0] != numbers.lhs_spec[0]:
        step.refuse(f"{step.variable} is not its batch axis")
    if step.params["batch_group_count"] != 1 or step.outs[0] != numbers.out_spec[0]:
        step.refuse(f"it groups its batch axis, which is {step.variable}")


_INDEX = "use jnp.take_along_axis, or jax.vmap of a function of one row"


def _gather(step: Step) -> None:
    numbers = step.params["dimension_numbers"]
    operand, indices = step.in_shapes
    own, at = step.ins
    out = step.outs[0]
    windows = sorted(numbers.offset_dims)
    batch = [i for i in range(len(step.out_shapes[0])) if i not in windows]
    if at is not None and at >= len(indices) - 1:
        step.refuse(f"an index is spread along {step.variable}")
    if own is None and at is not None:
        # Each row of indices reads the same operand, and gives one row of results.
        expected = batch[at]
    elif own is not None and at is not None:
        # Row i of the indices must read row i of the operand only: paired batching dimensions.
        paired = zip(
            numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
        )
        if (own, at) not in paired:
            step.refuse(f"each part along {step.variable} may read every other", _INDEX)
        expected = batch[at]
    elif own is not None:
        # The same indices read every row: the axis must be a whole window dimension.
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


def _scatter(step: Step) -> None:
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


def _windows(step: Step) -> None:
    axis, params = step.aligned(), step.params
    ones = [
        params[name][axis]
        for name in ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
        if params.get(name) is not None
    ]
    if any(n != 1 for n in ones) or tuple(params["padding"][axis]) != (0, 0):
        step.refuse(f"its windows slide along {step.variable}")


def _matrices(step: Step) -> None:
    axis = step.aligned()
    if axis >= len(step.in_shapes[0]) - 2:
        step.refuse(f"{step.variable} is an axis of its matrices")


def _keys_of(*generators: str) -> Callable[[Rule], Rule]:
    """Restrict a rule to keys of these generators.

    Another generator may use one key of a batch for the whole batch.
    """

    def held_to(rule: Rule) -> Rule:
        def checked(step: Step) -> None:
            keys = dtype_of(step.eqn.invars[0])
            if key_impl(keys) not in generators:
                step.refuse(
                    f"keys of {keys} are not known to be used one by one, and each chunk might "
                    "draw others",
                    "use keys of JAX's default generator (threefry2x32)",
                )
            rule(step)

        return checked

    return held_to


_drawing, _deriving = _keys_of("threefry2x32"), _keys_of("threefry2x32", "rbg")


def _drawn(step: Step) -> None:
    if step.ins[0] is None or step.proof.mentions(step.params["shape"]):
        step.refuse(
            f"one key is used for all of {step.variable}, and each chunk would draw the same",
            f"pass a key for each position along {step.variable}, and draw by jax.vmap",
        )


def _dim_as_value(step: Step) -> None:
    step.refuse(f"the size {step.params['dim']} is used as a number", _REDUCE_OUTSIDE)


def _size_constant(step: Step) -> None:
    """Accept a size constant without the variable in its shape; `Splitter` compares its value."""
    if step.outs[0] is not None:
        step.refuse(f"a constant of the program has {step.variable} along an axis")


def _call(step: Step) -> None:
    step.proof.inside(called_jaxpr(step.params))


def _cond(step: Step) -> None:
    if step.ins[0] is not None:
        step.refuse(f"its branch is chosen along {step.variable}")
    for branch in step.params["branches"]:
        step.proof.inside(branch)


def _while(step: Step) -> None:
    """A loop whose predicate has an axis of the variable must carry every value along that axis.

    A predicate with axes is what ``jax.vmap`` of a loop gives: each row stops when its own
    predicate is false, so rows do not depend on each other.
    """
    condition, body = step.params["cond_jaxpr"], step.params["body_jaxpr"]
    rows = step.proof.axis(shape_of(open_jaxpr(condition)[0].outvars[0]))
    carried = step.ins[step.params["cond_nconsts"] + step.params["body_nconsts"] :]
    if rows is not None and any(axis != rows for axis in carried):
        step.refuse(f"it goes on for as long as some part along {step.variable} does")
    step.proof.inside(condition)
    step.proof.inside(body)


def _scan(step: Step) -> None:
    # A scan over the variable is a map of its steps if nothing is carried from one to the next.
    if step.proof.mentions(step.params["length"]):
        consts, carried = scan_arity(step.params)
        if carried:
            step.refuse(f"it carries values from step to step along {step.variable}")
        if any(axis is not None for axis in step.ins[:consts]):
            step.refuse(f"each step along {step.variable} may read every other")
        if any(axis != 0 for axis in (*step.ins[consts:], *step.outs)):
            step.refuse(f"it does not step along {step.variable}")
    step.proof.inside(step.params["jaxpr"])


def _linear_solve(step: Step) -> None:
    step.proof.inside(step.params["jaxprs"].solve)


def _hi_primitive(step: Step) -> None:
    try:
        avals = [v.aval for v in step.eqn.invars]
        expanded = expand_hi_primitive(step.params["_prim"], avals)
    except Exception as error:
        if is_of_machine(error):
            raise
        step.refuse(f"it does not expand at symbolic sizes: {first_line(error)}")
    step.proof.inside(expanded)


def _associative_scan(step: Step) -> None:
    combine = step.params["combine"]
    if step.params["mode"] != PRIMAL:
        step.refuse("nothing is known of its derivatives")
    consts, elems = step.ins[: combine.num_consts], step.ins[combine.num_consts :]
    if any(axis is not None for axis in consts) or any(axis == combine.axis for axis in elems):
        step.refuse(f"it combines what is along {step.variable}", _REDUCE_OUTSIDE)
    step.proof.inside(combine.jaxpr)


def _table(rules: Mapping[str, Rule]) -> dict[Any, Rule]:
    return {p: rule for name, rule in rules.items() for p in primitives(*name.split())}


_reduction = _along_others(_in("axes"), "it reduces over")

_cumulative = _along_others(_is("axis"), "it accumulates along")

RULES: dict[Any, Rule] = _table(
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
        # Has no rule: its implementation is looked into, which on an accelerator draws for a whole
        # batch of keys at once.
        "random_gamma": _drawing(lambda step: step.proof.look_inside(step.eqn)),
        "random_split": _deriving(_drawn),
        "random_fold_in": _deriving(_elementwise),
        "dim_as_value": _dim_as_value,
    }
)

CONTROL: dict[Any, Rule] = _table(
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
) | {associative_scan_p: _associative_scan, size_constant_p: _size_constant}
