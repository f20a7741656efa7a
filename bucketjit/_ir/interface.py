"""What serving a call needs to know of a program: its shapes, types, trees and guards.

A `bucketjit._ir.program.Program` adds the jaxpr. A program that was saved in a file adds
compiled modules instead, see `bucketjit._artifact.saved_program`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bucketjit._ir.bounds import upper_bound_text
from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._ir.expressions import Shape, evaluate, symbolic_axes, variables_in, variables_of
from bucketjit._ir.guards import Guard
from bucketjit._jax.user_code import in_brackets
from bucketjit.errors import MaskingError, ShapeCheckError

_BYTES_OF_OBJECT = 1 << 14  # an estimate: the closure of a `jax.vjp` holds a small program


@dataclass(frozen=True)
class SizeConstants:
    """What a program needs at certain logical sizes and cannot compute from them.

    Attributes:
        sizes: The unfitted sizes, in the order of `Program.unfitted`.
        values: Constants that depend on the sizes: scalars, or arrays of logical shape.
        out_tree: Tree of the outputs if its auxiliary data depends on the sizes, else None.
        hosts: The functions that callbacks with results call on the host, in order.
    """

    sizes: tuple[int, ...] = ()
    values: tuple[np.ndarray, ...] = ()
    out_tree: Any = None
    hosts: tuple[Any, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the constants, plus an estimate for the tree and the functions."""
        objects = len(self.hosts) + (self.out_tree is not None)
        return sum(v.nbytes for v in self.values) + objects * _BYTES_OF_OBJECT


NO_SIZE_CONSTANTS = SizeConstants()


@dataclass(frozen=True)
class Computed:
    """A size that a program computes.

    Attributes:
        bound: The number of rows that it is chosen from, as text of an expression.
        line: The line of user code that computes it; ``""`` if it is not known.
        is_checked: Whether user code has given it, so that it may be out of bounds.
    """

    bound: str
    line: str = ""
    is_checked: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Interface:
    """A program without its body: which arguments and sizes it takes, and what it returns.

    Attributes:
        in_shapes: Shapes of the input arrays. Leaves that are sizes themselves are left out.
        out_shapes: Shapes of the outputs.
        out_types: dtype and weak type of each output.
        out_tree: Tree of the outputs; a flat tuple if the tree depends on the logical sizes.
        guards: Conditions that the logical sizes of a call must meet.
        lower: Smallest size of each variable, 1 unless a guard demands more.
        reshapes: The two shapes of each reshape whose element counts are equal at some sizes only,
            with its line of code.
        unfitted: Additional variables, for sizes that no expression of the others fits.
        size_constant_shapes: Shape of each of `SizeConstants.values`.
        pairing: The concrete traces it was made from, a `bucketjit._tracing.pairing.Pairing`; None
            if it was traced symbolically.
        computed: The sizes that the program computes, by variable, in order.
        counts: The computed sizes that its executables return after the results.
        presumed: Conditions that arrays of computed sizes are not empty, checked after a run.
        roomy: The variables whose arrays get room for the longer results that calls take again.
        refusal: Why it is not masked: it serves one size, as programs of other sizes do.
    """

    in_shapes: tuple[Shape, ...]
    out_shapes: tuple[Shape, ...]
    out_types: tuple[tuple[Any, bool], ...]
    out_tree: Any
    guards: tuple[Guard, ...]
    lower: Mapping[str, int]
    reshapes: Mapping[tuple[Shape, Shape], str] = field(default_factory=dict)
    unfitted: tuple[str, ...] = ()
    size_constant_shapes: tuple[Shape, ...] = ()
    pairing: Any = None
    computed: Mapping[str, Computed] = field(default_factory=dict)
    counts: tuple[str, ...] = ()
    presumed: tuple[Guard, ...] = ()
    roomy: tuple[str, ...] = ()
    refusal: MaskingError | None = None

    @property
    def constant_bytes(self) -> int:
        """Bytes of the arrays that each of its executables holds."""
        return 0

    def why_not_apart(self) -> MaskingError | None:
        """Why the program cannot be exported, or None: no module has results of such sizes."""
        if not self.computed:
            return None
        line = next(iter(self.computed.values())).line
        return MaskingError(
            f"the program computes sizes{in_brackets(line)}, and a module has no such results",
            "save it with BucketedExec.save, or give jnp.nonzero and the like a size",
        )

    @property
    def is_checked_after_runs(self) -> bool:
        """Whether the sizes that a run computes must be checked before its results are used."""
        is_checked = any(size.is_checked for size in self.computed.values())
        return bool(self.presumed or is_checked or self.computed_reshapes)

    @functools.cached_property
    def computed_reshapes(self) -> tuple[tuple[Shape, Shape], ...]:
        """Those of `reshapes` whose sizes the program computes, so that a run must tell them."""
        names = self.computed.keys()
        return tuple((a, b) for a, b in self.reshapes if variables_in((*a, *b)) & names)

    def computed_in_words(self) -> tuple[str, ...]:
        """The sizes that it computes, each with its bound and its line, and what it presumes."""
        sizes = [
            f"{variable} - 1 <= {size.bound}" + (f"  [{size.line}]" if size.line else "")
            for variable, size in self.computed.items()
        ]
        presumed = ", ".join(map(str, self.presumed))
        return (*sizes, f"assumed: {presumed}") if presumed else tuple(sizes)

    @property
    def open_outs(self) -> tuple[int, ...]:
        """Positions of the outputs with open axes."""
        return tuple(i for i, shape in enumerate(self.out_shapes) if symbolic_axes(shape))

    @functools.cached_property
    def grown(self) -> Mapping[str, Mapping[str, str]]:
        """The sizes of results that calls take again, by variable, each with what it has more.

        A result ``(b, s + 1)`` is taken to come back in the place of an argument ``(b, s)``. Where
        two variables may take it, or two of them grow by each other, the choice is not known.
        """
        if self.pairing is not None or self.computed or any(g.op == "==" for g in self.guards):
            return {}
        grown: dict[str, dict[str, str]] = {}
        for result in self.out_shapes:
            for axis in symbolic_axes(result):
                size = result[axis]
                takers = {
                    str(shape[axis]): shape[axis]
                    for shape in self.in_shapes
                    if len(shape) == len(result)
                    and _beside(shape, axis) == _beside(result, axis)
                    and str(shape[axis]) in variables_of(str(size))
                    and str(shape[axis]) in self.roomy
                }
                if len(takers) == 1 and str(size) not in takers:
                    ((name, taker),) = takers.items()
                    grown.setdefault(name, {})[str(size)] = str(size - taker)
        kept: dict[str, dict[str, str]] = {}
        for v, longer in grown.items():
            if alone := {s: m for s, m in longer.items() if not grown.keys() & variables_of(m)}:
                kept[v] = alone
        return kept

    def growth(self, bucket: Mapping[str, int]) -> dict[str, int]:
        """By how much the results that calls take again are longer in a bucket, by variable."""
        lower = {**dict.fromkeys(bucket, 1), **self.lower}
        return {
            v: max(upper_bound_text(more, lower, bucket) for more in longer.values())
            for v, longer in self.grown.items()
        }

    def sizes_before(
        self, sizes: Mapping[str, int], bucket: Mapping[str, int]
    ) -> dict[str, int] | None:
        """The sizes whose results are as long as arguments of these sizes; None if there are none.

        A size that fills a bucket of the strategy is served in the next one, so that its results
        fit. Who asks for the executable of that size means this one, too.
        """
        fewer = {v: n - self.growth(bucket).get(v, 0) for v, n in sizes.items()}
        is_smaller = fewer != sizes and min(fewer.values()) > 0
        return fewer if is_smaller and self.admits(fewer) else None

    def rooms(self, bucket: Mapping[str, int]) -> dict[str, int]:
        """The padded sizes of arguments and results that calls take again, by text."""
        growth = self.growth(bucket)
        return {
            size: bucket[v] + growth[v] for v, longer in self.grown.items() for size in (v, *longer)
        }

    def sizes_in(
        self,
        bucket: Mapping[str, int],
        values: Mapping[str, Any] = {},
        constants: Sequence[Any] = (),
        uneven: Sequence[str] = (),
    ) -> BucketSizes:
        """The sizes of a bucket, at some logical ones."""
        padded, rooms = self.padded_sizes(bucket), self.rooms(bucket)
        return BucketSizes(padded, self.lower, values, constants, uneven, rooms)

    def padded_sizes(self, bucket: Mapping[str, int]) -> Mapping[str, int]:
        """A bucket with the padded values of the computed sizes.

        A computed size is padded to the largest number of rows that it can select in the bucket.
        """
        if not self.computed:
            return bucket
        lower = {**dict.fromkeys((*bucket, *self.computed), 1), **self.lower}
        padded = dict(bucket)
        for variable, size in self.computed.items():
            padded[variable] = upper_bound_text(size.bound, lower, padded) + 1
        for guard in self.presumed:
            if upper_bound_text(guard.left, lower, padded) < 1:
                raise MaskingError(
                    f"the function is traced for {guard}, which no size of the bucket meets",
                    "say what an empty array gives, as in x[mask].max(initial=0)",
                    in_bucket=True,
                )
        return padded

    def admits(self, sizes: Mapping[str, int]) -> bool:
        """Whether every guard holds at these sizes."""
        return all(g.holds(sizes) for g in self.guards)

    def size_constants(self, sizes: Mapping[str, int]) -> SizeConstants | None:
        """The size constants of a call."""
        if not self.admits(sizes):
            return None
        return NO_SIZE_CONSTANTS if self.pairing is None else self.pairing.size_constants(sizes)

    def unfitted_sizes(self, bucket: Mapping[str, int]) -> dict[str, int] | None:
        """The padded values of the unfitted sizes."""
        return {} if self.pairing is None else self.pairing.unfitted_sizes(bucket)

    def fits(self, bucket: Mapping[str, int]) -> bool:
        """Whether the program may be built at the padded sizes of a bucket.

        Its shapes were simplified under its guards, so they must hold for padded sizes too. A guard
        ``!=`` comes from a comparison in user code. It concerns logical sizes only.
        """
        return all(g.op == "!=" or g.holds(bucket) for g in self.guards)

    def check_reshapes(self, sizes: Mapping[str, int]) -> None:
        """Raise the error of a reshape that fails at these logical sizes in the exact run.

        JAX does not check a reshape of symbolic sizes: ``x.reshape(s // 2, 2)`` is traced for all
        ``s``, but the exact run raises if ``s`` is odd.
        """
        for (before, after), line in self.reshapes.items():
            if not sizes.keys() >= variables_in((*before, *after)):
                continue
            a, b = ([evaluate(d, sizes) for d in shape] for shape in (before, after))
            if math.prod(a) != math.prod(b):
                raise ShapeCheckError(
                    f"cannot reshape array of shape {tuple(a)} (size {math.prod(a)}) into shape "
                    f"{tuple(b)} (size {math.prod(b)}), with sizes {dict(sizes)}{in_brackets(line)}"
                )


def _beside(shape: Shape, axis: int) -> list[str]:
    return [str(d) for i, d in enumerate(shape) if i != axis]
