"""Functions on a mesh: the shardings that the user asks for, and functions of one shard.

A function of one shard is traced so that its collectives may name the axis of the shards. Those
over shards whose sizes differ become primitives of `bucketjit._ir.primitives`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from bucketjit._config import Config, Sharded
from bucketjit._ir.dynamic_axes import STATIC
from bucketjit._ir.expressions import is_symbolic, variables_in, variables_of
from bucketjit._ir.interface import Interface
from bucketjit._ir.primitives import shard_mean_p, shard_psum_p
from bucketjit._ir.program import Program
from bucketjit._jax.arrays import sharding_for
from bucketjit._jax.config import named_axis, shard_keys
from bucketjit._jax.jaxprs import all_equations, shape_of
from bucketjit._jax.patches.operations import uneven_collectives
from bucketjit._jax.patches.patch import Replacing
from bucketjit._raised import first_line
from bucketjit._tracing.leaf_types import LeafType
from bucketjit.errors import ArgumentError, MaskingError, SpecError


@dataclass(frozen=True)
class Shardings:
    """What ``in_shardings`` and ``out_shardings`` say of the calls of one signature.

    Attributes:
        leaves: The sharding of each leaf of the arguments; None where nothing is said.
        results: The shardings of the results, a prefix of their tree.
    """

    leaves: tuple[Any, ...] = ()
    results: Any = None

    def options(
        self,
        tree: Any,
        shapes: Iterable[tuple[int, ...]],
        program: Interface | None = None,
        outs: Any = (),
    ) -> dict[str, Any]:
        """The options of ``jax.jit`` for a kernel, without axes of meshes that cut unequal parts.

        With a program it takes the sizes first, and returns ``outs``, its counts after them.
        Without one its results are not known, so nothing is said of them where arguments are
        placed in another way than the user says.
        """
        options: dict[str, Any] = {}
        leaves = tuple(map(_fitted, self.leaves, shapes))
        if leaves:
            sizes = () if program is None else (None,)
            options["in_shardings"] = (*sizes, *tree.unflatten(leaves)[0])
        if self.results is not None and program is not None:
            spread = _spread_out(self.results, program)
            fitted = [_fitted(s, out.shape) for s, out in zip(spread, outs, strict=False)]
            every = program.out_tree.unflatten(fitted)
            options["out_shardings"] = (every, None) if program.counts else every
        elif self.results is not None and leaves == self.leaves:
            options["out_shardings"] = self.results
        return options

    def without_parts(self, types: Sequence[LeafType]) -> tuple[LeafType, ...]:
        """Types of leaves, where what is placed by the user is of one type however it came.

        An array that is whole on a mesh with explicit axes, and to be cut, is that of no mesh.
        """
        placed = []
        for kind, sharding in itertools.zip_longest(types, self.leaves):
            if sharding is not None:
                cut, is_cut = (any(getattr(s, "spec", ())) for s in (sharding, kind.sharding))
                kept = None if cut and not is_cut else kind.sharding
                kind = kind._replace(partitions=None, sharding=kept)
            placed.append(kind)
        return tuple(placed)

    def cuts(self, rows: Iterable[Sequence[str]]) -> bool:
        """Whether the user has a mesh cut open axes of arguments, given as tokens."""
        return bool(_multiples(_demands(zip(rows, self.leaves, strict=False))))

    def multiples(self, rows: Iterable[Sequence[str]], program: Interface) -> dict[str, int]:
        """What the size of each variable must be a multiple of, for meshes and for kernels.

        Meshes cut axes of arguments and results, and constraints inside of the program do.
        """
        placed = [*zip(rows, self.leaves, strict=False)]
        if self.results is not None:
            placed += zip(program.out_shapes, _spread_out(self.results, program), strict=False)
        demands = _demands(placed)
        for eqn in all_equations(program.jaxpr) if isinstance(program, Program) else ():
            if eqn.primitive.name == "sharding_constraint":
                demands += _demands([(shape_of(eqn.outvars[0]), eqn.params["sharding"])])
            elif eqn.primitive.name == "kernel":
                multiples = eqn.params["call"].multiples
                named = [(name, size) for name, size in eqn.params["sizes"] if name in multiples]
                demands += [(s, multiples[name]) for name, s in named if str(s).isidentifier()]
        return _multiples(demands)


NO_SHARDINGS = Shardings()


def _fitted(sharding: Any, shape: tuple[int, ...]) -> Any:
    """The sharding of an array of this shape, without what would cut unequal parts.

    A spec of more axes stays: ``jit`` refuses it by the name of the argument or result.
    """
    fits = len(getattr(sharding, "spec", ())) <= len(shape)
    is_sharding = fits and isinstance(sharding, jax.sharding.Sharding)
    return sharding_for(sharding, shape) if is_sharding else sharding


def _is_leaf(node: Any) -> bool:
    return node is None or isinstance(node, PartitionSpec)


def _spread(option: str, prefix: Any, tree: Any, of: str) -> list[Any]:
    try:
        spread = jax.tree.broadcast(prefix, tree, is_leaf=_is_leaf)
    except ValueError as error:
        why = f"{option} must be a prefix of the tree of {of}: {first_line(error)}"
        raise ArgumentError(why) from error
    structure: Any = jax.tree.structure(tree)
    return list(structure.flatten_up_to(spread))


def _spread_out(prefix: Any, program: Interface) -> list[Any]:
    results = program.out_tree.unflatten(range(program.out_tree.num_leaves))
    return _spread("out_shardings", prefix, results, "the results")


def shardings_of(
    config: Config, positional: Sequence[Any], keywords: Mapping[str, Any]
) -> Shardings:
    """What the user says of the arguments of a call, by leaves, and of its results."""
    leaves: list[Any] = []
    if config.in_shardings is not None:
        if keywords:
            raise ArgumentError(
                f"in_shardings says nothing of keyword arguments, got {min(keywords)!r} by "
                "keyword; give it by position, as under jax.jit"
            )
        of = "the positional arguments that are not static"
        spread = _spread("in_shardings", config.in_shardings, tuple(positional), of)
        leaves = [_resolved("in_shardings", leaf) for leaf in spread]
    resolve = functools.partial(_resolved, "out_shardings")
    results = jax.tree.map(resolve, config.out_shardings, is_leaf=_is_leaf)
    return Shardings(tuple(leaves), results)


def _resolved(option: str, leaf: Any) -> Any:
    """The sharding of a partition spec, on the mesh that is set; else what it is."""
    if not isinstance(leaf, PartitionSpec):
        return leaf
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise SpecError(
            f"{option} has the {leaf}, which needs a mesh: call within jax.set_mesh(mesh), or give "
            "NamedSharding(mesh, spec)"
        )
    return NamedSharding(mesh, leaf)


def _demands(placed: Iterable[tuple[Sequence[Any], Any]]) -> list[tuple[Any, int]]:
    """The size of each axis, and the number of parts into which its sharding cuts it."""
    demands: list[tuple[Any, int]] = []
    for shape, sharding in placed:
        mesh: Any = getattr(sharding, "mesh", None)
        for size, names in zip(shape, getattr(sharding, "spec", ()), strict=False):
            names = names if isinstance(names, tuple) else (names,)
            parts = math.prod(mesh.shape[name] for name in names if isinstance(name, str))
            demands.append((size, parts))
    return demands


def _multiples(demands: Iterable[tuple[Any, int]]) -> dict[str, int]:
    """What the variables of sizes must be multiples of, so that the sizes are."""
    multiples: dict[str, int] = {}
    for size, multiple in demands:
        is_open = multiple > 1 and size != STATIC
        for variable in variables_of(str(size)) if is_open else ():
            multiples[variable] = math.lcm(multiples.get(variable, 1), multiple)
    return multiples


def on_shards(fn: Callable[..., Any], axis: Any, count: int) -> Callable[..., Any]:
    """A function of one shard, as it is traced: its collectives may name the axis."""

    @functools.wraps(fn, updated=())
    def of_one_shard(*args: Any, **kwargs: Any) -> Any:
        shards = _shards_of(axis, jax.tree_util.tree_leaves((args, kwargs)))
        with uneven_shards(), tracing_for(shards), named_axis(axis, count):
            try:
                return fn(*args, **kwargs)
            except NameError as error:
                if "axis name" in str(error):
                    error.add_note(f"with_processes: a function of one shard has the axis {axis!r}")
                raise

    return of_one_shard


def bound_axis(sharded: Sharded | None) -> AbstractContextManager[None]:
    """A context in which collectives may name the axis of the shards."""
    return nullcontext() if sharded is None else named_axis(sharded.axis, sharded.count)


def _shards_of(axis: Any, leaves: Sequence[Any]) -> Shards:
    """The axis, and the rows of a shard: the leading open axis of the arguments."""
    shapes = [tuple(getattr(x, "shape", ())) for x in leaves]
    sizes = [d for shape in shapes for d in shape if is_symbolic(d)]
    if not sizes:
        return Shards(axis, 1)  # a trace at concrete sizes, which shows errors and is not run
    leading = [shape[0] for shape in shapes if shape and is_symbolic(shape[0])]
    names = sorted(variables_in(leading))
    if len(names) > 1:
        why = f"the first axes of the arguments are {' and '.join(names)}"
        return Shards(axis, None, why, sizes[0])
    for size in leading:
        if str(size) == names[0]:
            return Shards(axis, size, "", size)
    return Shards(axis, None, "no argument has them as its first axis", sizes[0])


# --- collectives while a function of one shard is traced ---


@dataclass(frozen=True)
class Shards:
    """The shards that a function is traced for.

    Attributes:
        axis: The name of their axis.
        rows: The rows of a shard, a size; None if that is not known.
        why: Why it is not known.
        size: Any open size, as masking rules are asked for equations that mention one.
    """

    axis: Any
    rows: Any
    why: str = ""
    size: Any = 1


_traced_for: ContextVar[Shards | None] = ContextVar("shards", default=None)


@contextmanager
def tracing_for(shards: Shards) -> Iterator[None]:
    """A context in which this thread traces a function of one shard."""
    token = _traced_for.set(shards)
    try:
        # Traces that JAX keeps of inner functions belong to the shards that they were made for.
        with shard_keys(str(shards)):
            yield
    finally:
        _traced_for.reset(token)


def axis_of_shards() -> Any:
    """The axis of the shards for which this thread traces a function; None if it does not."""
    shards = _traced_for.get()
    return None if shards is None else shards.axis


def mean_over_shards(x: Any) -> Any:
    """The mean of an array over the shards, by their rows."""
    shards = _traced_for.get()
    assert shards is not None
    if shards.rows is None:
        raise MaskingError(
            f"pmean weighs by the rows of each shard, and {shards.why}",
            "divide jax.lax.psum of a sum by jax.lax.psum of what it counts",
        )
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        x = jnp.true_divide(x, 1)
    return shard_mean_p.bind(x, axis=shards.axis, rows=shards.rows, is_transposed=False)


def sum_over_shards(x: Any) -> Any:
    """The sum of a float array over the shards."""
    shards = _traced_for.get()
    assert shards is not None
    params = {"axis": shards.axis, "size": shards.size, "is_transposed": False}
    return shard_psum_p.bind(jnp.asarray(x), **params)


uneven_shards = Replacing(*uneven_collectives(axis_of_shards, mean_over_shards, sum_over_shards))
"""While active, collectives know uneven shards."""
