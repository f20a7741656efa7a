"""Calls of a function of one shard: each process gives its own rows, and all run one executable.

    process 0    x of 5 rows    b=16   padded    ┐                        ┌ its 5 rows of the result
    process 1    x of 9 rows    b=16   padded    ┘ one global array, run  └ its 9 rows

Every shard has its own logical sizes, so no call can run at its exact shape: whatever would make it
run exact is an error.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from bucketjit._arrays.padded import Padded
from bucketjit._arrays.padding import pad, plain, unpad
from bucketjit._arrays.results import as_numpy, joined
from bucketjit._compile.executable import Executable
from bucketjit._config import Check, Out, Sharded
from bucketjit._ir.dataflow import Analysis, follow, table, through
from bucketjit._ir.expressions import is_symbolic
from bucketjit._ir.interface import Interface
from bucketjit._ir.primitives import COMBINED, shard_mean_p, shard_psum_p
from bucketjit._ir.program import Program
from bucketjit._jax.jaxprs import CALLBACKS, all_equations, bodies, open_jaxpr, shape_of
from bucketjit._jax.user_code import in_brackets, source_line
from bucketjit._processes import build_shards
from bucketjit._processes.split_rows import ShardedCall, refuse_results, sharded_call
from bucketjit._runtime.counters import CallCounter
from bucketjit._runtime.decisions import Because
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.fast_path.dispatch import Arguments
from bucketjit._runtime.runs import counted
from bucketjit.errors import FallbackError, MaskingError, SpecError


def _followed(analysis: Analysis[Any], program: Program) -> list[Any]:
    jaxpr = program.jaxpr
    constants = {var: analysis.unknown(var) for var in jaxpr.constvars}
    return follow(analysis, jaxpr, list(map(analysis.unknown, jaxpr.invars)), constants)


class _SameOnAll(Analysis[bool]):
    """Whether a value is the same on all shards."""

    def __init__(self, axis: Any) -> None:
        self._axis = axis
        self.table = table(
            {
                "psum pmax pmin all_gather": self._combined,
                "axis_index ppermute all_to_all reduce_scatter pbroadcast": _differs,
                " ".join(CALLBACKS): _differs,
                "cond": self._branches,
                "while": self._while_loop,
                "scan": self._scan,
            }
        )

    def unknown(self, atom: Any) -> bool:
        return not _is_open(atom)

    def literal(self, atom: Literal) -> bool:
        return True

    def join(self, left: bool, right: bool) -> bool:
        return left and right

    def row(self, value: bool, var: Var) -> bool:
        return value and not _is_open(var)

    stacked = row

    def default(self, eqn: JaxprEqn, ins: Sequence[bool]) -> Sequence[bool]:
        if eqn.primitive in COMBINED:
            return [True]
        same = all(ins) and not _mentions_size(eqn)
        return [same and not _is_open(var) for var in eqn.outvars]

    def _combined(self, eqn: JaxprEqn, ins: Sequence[bool]) -> Sequence[bool]:
        over = self._axis in _axes(eqn) and not eqn.params.get("axis_index_groups")
        same = ins if len(ins) == len(eqn.outvars) else [all(ins)] * len(eqn.outvars)
        return [(over or x) and not _is_open(v) for x, v in zip(same, eqn.outvars, strict=True)]

    def _branches(self, eqn: JaxprEqn, ins: Sequence[bool]) -> Sequence[bool]:
        outs = through(self, eqn, ins)
        return outs if ins[0] else self._different(eqn, "condition")

    def _while_loop(self, eqn: JaxprEqn, ins: Sequence[bool]) -> Sequence[bool]:
        outs = through(self, eqn, ins)
        condition = open_jaxpr(eqn.params["cond_jaxpr"])[0]
        consts = ins[: eqn.params["cond_nconsts"]]
        (goes_on,) = follow(self, condition, [*consts, *outs])
        return outs if goes_on else self._different(eqn, "condition")

    def _scan(self, eqn: JaxprEqn, ins: Sequence[bool]) -> Sequence[bool]:
        if is_symbolic(eqn.params["length"]):
            return self._different(eqn, "number of steps")
        return through(self, eqn, ins)

    def _different(self, eqn: JaxprEqn, what: str) -> Sequence[bool]:
        """The results of a branch or a loop that differs, in which no collective may be."""
        for inner in (inner for body in bodies(eqn) for inner in all_equations(body)):
            waits = self._axis in _axes(inner) and inner.primitive.name != "axis_index"
            if waits or inner.primitive in COMBINED:
                raise MaskingError(
                    f"{eqn.primitive.name}: it holds a collective, and its {what} differs from "
                    "shard to shard, so shards would wait for each other for ever"
                    + in_brackets(source_line(inner, (eqn,)) or source_line(eqn)),
                    "decide by a value that is the same on all shards, such as jax.lax.pmax "
                    "of it, or take the collective out",
                )
        return _differs(eqn, ())


_Through = frozenset[Any]  # the primitives whose transposes a value was computed by

_NAMES = {shard_mean_p: "pmean", shard_psum_p: "psum"}


class _OneWeighting(Analysis[_Through]):
    """Which transposes a value was computed by."""

    def unknown(self, atom: Any) -> _Through:
        return frozenset()

    def join(self, left: _Through, right: _Through) -> _Through:
        return left | right

    def row(self, value: _Through, var: Any) -> _Through:
        return value

    stacked = row

    def default(self, eqn: JaxprEqn, ins: Sequence[_Through]) -> Sequence[_Through]:
        before, primitive = frozenset().union(*ins), eqn.primitive
        if primitive not in _NAMES:
            return [before] * len(eqn.outvars)
        if eqn.params["is_transposed"]:
            return [before | {primitive}]
        if others := sorted(_NAMES[p] for p in before - {primitive}):
            raise MaskingError(
                f"a gradient that was taken through {others[0]} is combined by "
                f"{_NAMES[primitive]}, which weighs shards of different sizes in another way"
                + in_brackets(source_line(eqn)),
                "use jax.lax.pmean for both, or psum for both; or take the gradient of the sum of "
                "each shard, and divide its psum by the psum of what it counts",
            )
        return [frozenset()]


def _axes(eqn: JaxprEqn) -> Sequence[Any]:
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return names if isinstance(names, tuple | list) else (names,)


def _differs(eqn: JaxprEqn, ins: Sequence[bool]) -> Sequence[bool]:
    return [False] * len(eqn.outvars)


def _is_open(atom: Any) -> bool:
    return any(map(is_symbolic, shape_of(atom)))


def _mentions_size(eqn: JaxprEqn) -> bool:
    """Whether a parameter holds a size, in tuples and in programs too."""
    inner = [each for body in bodies(eqn) for each in all_equations(body)]
    values = [x for each in (eqn, *inner) for x in jax.tree_util.tree_leaves(each.params)]
    opened = (_is_open(v) for each in inner for v in (*each.invars, *each.outvars))
    return any(map(is_symbolic, values)) or any(opened)


_NO_EXACT = "a call that processes or shards run together cannot run at its exact shape"

#: Why a call on shards would run at its exact shape, where that is not the program.
WITHOUT_ROWS = {
    Because.EMPTY: MaskingError(
        "an axis has size 0, and each shard needs one row at least",
        "give this process a row, or leave its devices out of the mesh",
    ),
    Because.NO_OPEN_AXIS: MaskingError(
        "no argument has an open axis, so nothing differs from shard to shard",
        "name the rows in dynamic_axes, or use jax.jit",
    ),
}


class OnShards:
    """Runs the calls of one engine on the shards of a mesh."""

    def __init__(self, chosen: Sharded) -> None:
        self._chosen = chosen
        self._checked: weakref.WeakSet[Interface] = weakref.WeakSet()

    def cut(self, engine: Engine, arguments: Arguments) -> ShardedCall:
        """Resolve the calls of the shards of this process; other arrays of devices become local."""
        if any(map(_is_spread, jax.tree_util.tree_leaves(arguments))):
            arguments = jax.tree_util.tree_map(_local, arguments)
        call = engine.signer.sign(*arguments)
        if engine.config.check is not Check.OFF:
            raise SpecError(
                f"check={engine.config.check.value!r}: a call on shards of different sizes is not "
                "checked; check the function without with_processes, by jax.vmap(axis_name=...)"
            )
        return sharded_call(engine, call, len(build_shards.local_shards(self._chosen).devices))

    def check(self, call: ShardedCall, program: Interface) -> None:
        """Refuse programs whose results depend on the shard, or on sizes that each computes."""
        refuse_results(call, program)
        if program in self._checked:
            return
        if program.computed:
            why = MaskingError("it computes sizes, which differ from shard to shard")
            raise no_exact_shape(why)
        assert isinstance(program, Program)
        try:
            _followed(_OneWeighting(), program)  # raises if gradients are weighed in both ways
            same = _followed(_SameOnAll(self._chosen.axis), program)[: len(program.out_shapes)]
        except MaskingError as refusal:
            raise no_exact_shape(refusal) from None
        differing = [
            i for i, is_same in enumerate(same) if not is_same and i not in program.open_outs
        ]
        if differing:
            axis = self._chosen.axis
            raise FallbackError(
                f"{_named(program, differing[0])} differs from shard to shard, and has no rows",
                f"reduce it over the shards with jax.lax.psum or jax.lax.pmean over {axis!r}",
            )
        self._checked.add(program)

    def run(self, engine: Engine, call: ShardedCall, entry: Executable, out: Out) -> Any:
        """Run a call in a bucket that all processes have chosen."""
        shards = build_shards.local_shards(self._chosen)
        whole, shapes = call.whole, dict(entry.pads)
        real = sum(math.prod(whole.shapes[i]) for i in shapes)
        total = len(call.parts) * sum(map(math.prod, shapes.values()))
        sizes, key = call.call.sizes, whole.shape_key
        line = CallCounter(sizes, entry.sizes, real, total, key=key)
        with counted(engine.counters, line):
            vectors = [np.array([p.call.ordered], np.int32) for p in call.parts]
            arguments = []
            for i in build_shards.array_leaves(whole):
                value = whole.leaves[i]
                if i not in shapes:
                    arguments.append(build_shards.global_whole(shards, plain(value)))
                    continue
                parts = [pad(p.value(i, value), shapes[i]) for p in call.parts]
                arguments.append(build_shards.global_rows(shards, parts))
            results = entry.run(build_shards.global_rows(shards, vectors), arguments)
        return _results(shards, entry, call, results, out)


def _is_spread(leaf: Any) -> bool:
    """Whether an argument is cut over several devices, or its type names a mesh."""
    return isinstance(leaf, jax.Array) and build_shards.is_foreign(leaf.sharding)


def _local(leaf: Any) -> Any:
    """An argument as an array of this process, if it is spread and this process has all of it."""
    if not _is_spread(leaf):
        return leaf
    if leaf.is_fully_replicated:
        return leaf.addressable_data(0)
    return np.asarray(leaf) if leaf.is_fully_addressable else leaf


def no_exact_shape(why: MaskingError) -> FallbackError:
    """The error for a call that is run together, and could only run at its exact shape."""
    return FallbackError(f"{_NO_EXACT}: {why.reason}", why.remedy)


def _named(program: Interface, position: int) -> str:
    tree = program.out_tree.unflatten(range(program.out_tree.num_leaves))
    for path, i in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if i == position and path:
            return f"the result{jax.tree_util.keystr(path)}"
    return "the result"


def _results(
    shards: build_shards.LocalShards, entry: Executable, call: ShardedCall, results: Any, out: Out
) -> Any:
    """The results of this process: its own rows, and what is the same on all shards."""
    tree: Any
    leaves, tree = jax.tree_util.tree_flatten(results)
    opened = {o.position: o for o in entry.outs}
    for i, value in enumerate(leaves):
        if i not in opened:
            leaves[i] = as_numpy(value) if out is Out.NUMPY else value
            continue
        there = {shard.device: shard.data for shard in value.addressable_shards}
        parts = [
            Padded.of_result(there[devices[0]], opened[i].logical(*part.call.ordered))
            for devices, part in zip(shards.devices, call.parts, strict=True)
        ]
        if len(parts) > 1:
            leaves[i] = joined(parts, opened[i].weak_type, out)
        elif out is Out.PADDED:
            leaves[i] = parts[0]
        else:
            whole = unpad(parts[0].array, parts[0].sizes, opened[i].weak_type)
            leaves[i] = as_numpy(whole) if out is Out.NUMPY else whole
    return tree.unflatten(leaves)
