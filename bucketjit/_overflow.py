"""Sizes beyond the largest bucket: go on by a rule, run exact, or run in chunks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np

from bucketjit import strategies
from bucketjit._config import Config, Overflow
from bucketjit._dims import evaluate_text, variables_of
from bucketjit._errors import BucketOverflowError, MaskingError, SplitError
from bucketjit._family import Call
from bucketjit._independence import split_axes
from bucketjit._padding import fresh, part
from bucketjit._results import Out, joined
from bucketjit._signing import Signed
from bucketjit._trace import Program
from bucketjit.strategies.base import checked_bucket, checked_joint
from bucketjit.strategies.extended import extended

_ATTEMPTS = 16  # how far chunks may be from the largest bucket to keep the guards of a program


def policy_of(config: Config, variable: str) -> Overflow:
    """What happens to sizes of a variable that are beyond its largest bucket."""
    return config.overflow_per_dim.get(variable, config.overflow)


def padded_sizes(config: Config, sizes: Mapping[str, int]) -> dict[str, int]:
    """The bucket of each variable.

    Raises:
        BucketOverflowError: A size is beyond the largest bucket, and its policy is to raise or
            to split.
    """
    planned, _ = _planned(config, sizes)
    return {v: planned[v] if v in planned else padded_size(config, v, n) for v, n in sizes.items()}


def _planned(
    config: Config, sizes: Mapping[str, int]
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """The buckets that the joint plan chooses; and of those left as they are, the largest."""
    plan = config.plan
    if plan is None or any(dim not in sizes for dim in plan.dims):
        return {}, {}
    grows = tuple(d for d in plan.dims if policy_of(config, d) is Overflow.EXTEND)
    if grows and hasattr(plan, "extended"):
        plan = plan.extended(grows)
    wanted = {dim: sizes[dim] for dim in plan.dims}
    beyond: dict[str, int] = {}
    while True:
        try:
            chosen = checked_joint(plan, wanted)
        except BucketOverflowError as error:
            dim = error.dim
            if dim is None or dim in beyond or policy_of(config, dim) is not Overflow.EXACT:
                raise
            beyond[dim] = wanted[dim] = error.largest
            continue
        return {**chosen, **{dim: sizes[dim] for dim in beyond}}, beyond


def padded_size(config: Config, variable: str, n: int) -> int:
    """The bucket of one variable.

    Raises:
        BucketOverflowError: The size is beyond the largest bucket, and its policy is to raise or
            to split.
    """
    strategy = config.strategy_of(variable)
    try:
        return checked_bucket(strategy, variable, n)
    except BucketOverflowError:
        match policy_of(config, variable):
            case Overflow.EXTEND:
                return checked_bucket(extended(strategy), variable, n)
            case Overflow.EXACT:
                return n
        raise


class Exactly(NamedTuple):
    """A call with variables at their exact size.

    Attributes:
        reason: Why, in words.
        wholly: Whether no variable is padded, so that nothing need be masked.
    """

    reason: str
    wholly: bool


def exactly(config: Config, sizes: Mapping[str, int]) -> Exactly | None:
    """Which of these sizes are beyond the largest bucket and left as they are; None if none is."""
    planned, beyond = _planned(config, sizes)
    found = dict(beyond)
    exact = len(found)
    for variable, n in sizes.items():
        if variable in planned:
            continue
        strategy = config.strategy_of(variable)
        if isinstance(strategy, strategies.Exact):
            exact += 1
        elif policy_of(config, variable) is Overflow.EXACT:
            try:
                checked_bucket(strategy, variable, n)
            except BucketOverflowError as error:
                found[variable] = error.largest
                exact += 1
    if not found:
        return None
    told = ", ".join(f"{v} is beyond its largest bucket {n}" for v, n in found.items())
    return Exactly(f"the size of {told} (Overflow.EXACT)", exact == len(sizes))


class Splitting(NamedTuple):
    """How a call is cut into chunks.

    Attributes:
        variable: The dimension variable that is cut.
        sizes: Its size in each chunk.
        axes: For each output, the axis along which chunks are joined, or None if all are the same.
    """

    variable: str
    sizes: tuple[int, ...]
    axes: tuple[int | None, ...]


class Splitter:
    """Runs calls in chunks.

    Args:
        config: The configuration.
        lock: Held while programs are traced.
    """

    def __init__(self, config: Config, lock: AbstractContextManager[Any]) -> None:
        self._config = config
        self._lock = lock
        self._shown: dict[tuple[Program, str], tuple[int | None, ...] | MaskingError] = {}

    def clear(self) -> None:
        """Forget what was found out of programs."""
        self._shown.clear()

    def plan(self, call: Call, error: BucketOverflowError) -> Splitting:
        """How to cut a call whose size is beyond the largest bucket.

        Args:
            call: The call; it has a program.
            error: What told so.

        Raises:
            SplitError: The program does not show that the chunks can be told apart.
            BucketOverflowError: ``error``, if the policy of its variable is another.
        """
        variable, largest = error.dim, error.largest
        total = call.sizes.get(variable, 0) if variable is not None else 0
        if variable is None or not 1 <= largest < total:
            raise error
        if policy_of(self._config, variable) is not Overflow.SPLIT:
            raise error
        try:
            assert call.program is not None
            axes = self._axes(call.program, variable)
            sizes = self._sizes(call.program, call, variable, largest)
        except MaskingError as why:
            raise SplitError(total, largest, variable, why.reason, why.remedy) from None
        return Splitting(variable, sizes, axes)

    def run(
        self,
        serve: Callable[[Signed], Any],
        signed: Signed,
        call: Call,
        error: BucketOverflowError,
        out: Out,
    ) -> Any:
        """Run a call in chunks, each an ordinary call, and join their results.

        Args:
            serve: Runs a call, with results in the form `Out.PADDED`.
            signed: The call. What it donates is left alone.
            call: The same call, resolved.
            error: What told that its size is beyond the largest bucket.
            out: The form of results.

        Raises:
            SplitError, BucketOverflowError: See `plan`.
        """
        plan = self.plan(call, error)
        results = [serve(chunk) for chunk in chunks(signed, call, plan)]  # none is waited for
        trees = {jax.tree_util.tree_structure(result) for result in results}
        if len(trees) > 1:
            shown = " and ".join(map(str, trees))
            raise SplitError(
                error.size, error.largest, error.dim, f"chunks return different trees, {shown}"
            )
        assert call.program is not None
        leaves = zip(*map(jax.tree_util.tree_leaves, results), strict=True)
        types = call.program.out_types
        whole = [
            joined(parts, axis, weak, out)
            for parts, axis, (_, weak) in zip(leaves, plan.axes, types, strict=True)
        ]
        return jax.tree_util.tree_unflatten(trees.pop(), whole)

    def _axes(self, program: Program, variable: str) -> tuple[int | None, ...]:
        shown = self._shown.get((program, variable))
        if shown is None:
            try:
                shown = split_axes(program, variable)
            except MaskingError as refusal:
                shown = refusal
            self._shown[program, variable] = shown
        if isinstance(shown, MaskingError):
            raise shown
        return shown

    def _sizes(self, program: Program, call: Call, variable: str, largest: int) -> tuple[int, ...]:
        """Sizes of chunks, as large as the guards of the program let them be.

        Raises:
            MaskingError: They let no sizes be, or at least none that is near the largest bucket.
        """
        sizes, total = call.sizes, call.sizes[variable]
        constants = [x.tobytes() for x in call.leaks.values]
        changed = False

        def serves(n: int) -> bool:
            nonlocal changed
            with self._lock:
                leaks = program.leaks({**sizes, variable: n})
            if leaks is None:
                return False
            same = [x.tobytes() for x in leaks.values] == constants
            changed |= not same
            return same

        if not serves(largest) and changed:
            raise MaskingError(
                f"a number that the function computes of sizes is another for chunks of {largest}",
                f"compute it of other sizes than {variable}",
            )
        for size in range(largest, max(0, largest - _ATTEMPTS), -1):
            if not serves(size):
                continue
            whole, rest = divmod(total, size)
            if not rest:
                return (size,) * whole
            for moved in range(min(_ATTEMPTS, size - rest + 1, size)):
                if serves(size - moved) and serves(rest + moved):
                    return (*(size,) * (whole - 1), size - moved, rest + moved)
        trial = {**sizes, variable: largest}
        broken = [str(g) for g in program.guards if not g.holds(trial)]
        what = f"where {broken[0]}" if broken else "at sizes like this"
        raise MaskingError(
            f"the function was traced {what}, and may do something else for chunks of {largest}",
            "let it not decide by sizes",
        )


def chunks(signed: Signed, call: Call, plan: Splitting) -> list[Signed]:
    """The calls that a call is cut into, in order."""
    positional, _ = signed.tree.unflatten(range(len(signed.leaves)))
    donated = set(jax.tree_util.tree_leaves([positional[i] for i in signed.donate]))
    ends = list(itertools.accumulate(plan.sizes))
    return [
        _chunk(signed, call, plan.variable, start, end, donated)
        for start, end in zip([0, *ends], ends, strict=False)
    ]


def _chunk(
    signed: Signed, call: Call, variable: str, start: int, end: int, donated: set[int]
) -> Signed:
    leaves, shapes = list(signed.leaves), list(signed.shapes)
    sizes = {**call.sizes, variable: end - start}
    for i, (row, kind) in enumerate(zip(call.tokens, signed.family.types, strict=True)):
        axis = _axis_of(row, variable)
        value = leaves[i]
        if axis is None:
            leaves[i] = fresh(value) if i in donated else value
        elif kind.dtype is None:
            size = evaluate_text(row[0], sizes)
            leaves[i] = value.dtype.type(size) if isinstance(value, np.integer) else size
            shapes[i] = (size,)
        else:
            block = evaluate_text(row[axis], {**sizes, variable: 1})
            leaves[i] = part(value, axis, start * block, end * block)
            if i in donated:
                leaves[i] = fresh(leaves[i])
            shapes[i] = tuple(leaves[i].shape)
    return dataclasses.replace(signed, leaves=leaves, shapes=shapes)


def _axis_of(row: Sequence[str], variable: str) -> int | None:
    return next((i for i, t in enumerate(row) if variable in variables_of(t)), None)
