"""Calls of a function of one shard: each process gives its own rows, and all run one executable.

    process 0    x of 5 rows    b=16   padded    ┐                        ┌ its 5 rows of the result
    process 1    x of 9 rows    b=16   padded    ┘ one global array, run  └ its 9 rows

Every shard has its own logical sizes, so no call can run at its exact shape: whatever would make it
run exact is an error.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

from bucketjit._arrays.padded import Padded
from bucketjit._arrays.padding import pad, plain, unpad
from bucketjit._arrays.results import as_numpy, joined
from bucketjit._compile.executable import Executable
from bucketjit._config import Check, Out, Sharded
from bucketjit._ir.interface import Interface
from bucketjit._ir.program import Program
from bucketjit._processes.build_shards import array_leaves
from bucketjit._processes.same_on_all import is_same_on_all, refuse_two_weightings
from bucketjit._processes.shard_axis import (
    LocalShards,
    global_rows,
    global_whole,
    is_foreign,
    local_shards,
)
from bucketjit._processes.split_rows import ShardedCall, refuse_results, sharded_call
from bucketjit._runtime.call_counts import CallCounter
from bucketjit._runtime.decisions import Because
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.runs import counted
from bucketjit.errors import FallbackError, MaskingError, SpecError

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

    def cut(self, engine: Engine, given: tuple[tuple[Any, ...], Mapping[str, Any]]) -> ShardedCall:
        """Cut a call into those of the shards of this process, and resolve them.

        Arrays of several devices that are not placed as results become local.
        """
        if any(map(_is_spread, jax.tree_util.tree_leaves(given))):
            given = jax.tree_util.tree_map(_local, given)
        signed = engine.signer.sign(*given)
        if engine.config.check is not Check.OFF:
            raise SpecError(
                f"check={engine.config.check.value!r}: a call on shards of different sizes is not "
                "checked; check the function without with_processes, by jax.vmap(axis_name=...)"
            )
        return sharded_call(engine, signed, len(local_shards(self._chosen).devices))

    def check(self, call: ShardedCall, program: Interface) -> None:
        """Refuse programs whose results depend on the shard, or on sizes that each computes."""
        refuse_results(call, program)
        if program in self._checked:
            return
        if program.computed:
            raise no_exact_shape(
                MaskingError("it computes sizes, which differ from shard to shard")
            )
        assert isinstance(program, Program)
        try:
            refuse_two_weightings(program)
            same = is_same_on_all(program, self._chosen.axis)
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
        shards, given, shapes = local_shards(self._chosen), call.given, dict(entry.pads)
        real = sum(math.prod(given.shapes[i]) for i in shapes)
        total = len(call.parts) * sum(map(math.prod, shapes.values()))
        sizes, key = call.call.sizes, given.shape_key
        line = CallCounter(sizes, entry.sizes, real, total, key=key)
        with counted(engine.counters, line):
            vectors = [np.array([p.call.ordered], np.int32) for p in call.parts]
            arguments = []
            for i in array_leaves(given):
                value = given.leaves[i]
                if i not in shapes:
                    arguments.append(global_whole(shards, plain(value)))
                    continue
                parts = [pad(p.value(i, value), shapes[i]) for p in call.parts]
                arguments.append(global_rows(shards, parts))
            results = entry.run(global_rows(shards, vectors), arguments)
        return _results(shards, entry, call, results, out)


_NO_MESH = jax.sharding.Mesh(np.empty((), dtype=object), ())


def outside_of_meshes() -> AbstractContextManager[Any]:
    """A context without the mesh of ``jax.set_mesh``: the shards have a mesh of their own."""
    is_set = not jax.sharding.get_abstract_mesh().empty
    return jax.set_mesh(_NO_MESH) if is_set else nullcontext()


def _is_spread(leaf: Any) -> bool:
    """Whether an argument is cut over several devices, or its type names a mesh."""
    return isinstance(leaf, jax.Array) and is_foreign(leaf.sharding)


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
    """How messages name a result."""
    tree = program.out_tree.unflatten(range(program.out_tree.num_leaves))
    for path, i in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if i == position and path:
            return f"the result{jax.tree_util.keystr(path)}"
    return "the result"


def _results(
    shards: LocalShards, entry: Executable, call: ShardedCall, results: Any, out: Out
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
            Padded.of_result(there[own[0]], opened[i].logical(*part.call.ordered))
            for own, part in zip(shards.devices, call.parts, strict=True)
        ]
        if len(parts) > 1:
            leaves[i] = joined(parts, opened[i].weak_type, out)
        elif out is Out.PADDED:
            leaves[i] = parts[0]
        else:
            whole = unpad(parts[0].array, parts[0].sizes, opened[i].weak_type)
            leaves[i] = as_numpy(whole) if out is Out.NUMPY else whole
    return tree.unflatten(leaves)
