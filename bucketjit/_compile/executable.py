"""What the cache holds: an executable for one bucket, and what it takes and gives."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from bucketjit._arrays.padding import pad
from bucketjit._arrays.results import Change, finisher
from bucketjit._config import Out
from bucketjit._jax.compiler import signature_counter
from bucketjit._masking.checks import POISONS, pad_poisoned
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall
from bucketjit._sizes.dynamic_axes import Tokens


class SignatureChanged(Exception):
    """An executable was called with arguments it was not built for.

    Raised while ``jit`` retraces it, which happens before anything runs or is donated. This is
    how static leaves are checked by jit's own C++ code, and not by Python at every call.
    """


@dataclass(eq=False)
class Executable:
    """One compiled program for one bucket, or for one exact shape.

    Attributes:
        sizes: Size of each dimension variable it is for.
        exact: Whether it runs unpadded.
        function: The jitted function; takes the sizes (if not exact), then the arguments.
        compiled: Its executable.
        compile_seconds: What building it took, or reading it from a file.
        out_tree: Tree of the outputs.
        compiles: The jitted function behind it, which compiles for what ``function`` does not know.
        pads: Position among the leaves and padded shape of each argument with open axes.
        outs: The outputs with open axes.
        size_constant_shapes: Padded shape of each constant that depends on the logical sizes.
        donated_leaves: Positions of the leaves with open axes whose padded copy is donated.
        constant_bytes: Memory of the arrays that the program closes over.
        on_compile: Told of each compile after the first: like any jitted function, it is compiled
            once more for arguments that are committed to a device where those before were not.
        loaded: Whether it was read from a file, and not compiled; see `bucketjit._persistence`.
        checked: Whether a call of it was found to equal its unpadded run (`Check.EXACT`).
        origin: The call that it was first wanted for, without its arrays; None if not known.
        open_outs: Positions of the results with open axes where it runs exact and no program tells;
            None as long as nobody asked, see `bucketjit._runtime.open_outputs`.
        signatures: How many signatures of arguments, placement included, it knows.
        to_host: Does what ``function`` does, but results that are there in host memory when it
            returns, and would go to JAX's default device, may be NumPy's.
        bind: Takes what several calls have in common, for which ``to_host`` would look at it each
            time; see `bucketjit._cores.single_threaded.Bound`. None if it is not to be had.
    """

    sizes: Mapping[str, int]
    exact: bool
    function: Callable[..., Any]
    compiled: Any
    compile_seconds: float
    out_tree: Any
    compiles: Callable[..., Any]
    pads: tuple[tuple[int, tuple[int, ...]], ...] = ()
    outs: tuple[OpenOut, ...] = ()
    size_constant_shapes: tuple[tuple[int, ...], ...] = ()
    donated_leaves: frozenset[int] = frozenset()
    constant_bytes: int = 0
    on_compile: Callable[[Executable], None] | None = None
    loaded: bool = False
    origin: Origin | None = None
    checked: bool = False
    open_outs: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.count_signatures = signature_counter(self.compiles)
        self.signatures = self.count_signatures()
        self.to_host: Callable[..., Any] = getattr(self.function, "to_host", self.function)
        self.bind: Callable[..., Any] | None = getattr(self.function, "bind", None)
        # What was compiled beforehand serves the first placement; nothing was if it was loaded.
        self._placements: set[Any] = {None}
        if self.origin is not None and not self.loaded:
            padded = {i for i, _ in self.pads}
            made_for = enumerate(self.origin.signed.leaves)
            self._placements = {tuple(_placement(x, i in padded) for i, x in made_for)}

    @functools.cached_property
    def nbytes(self) -> int:
        """Memory that it takes: code, temporaries, results, and the arrays it closes over.

        As XLA's memory analysis tells; on CPU that leaves out the code, some 4-9 MB.
        """
        told = self.compiled.memory_analysis()
        if told is None:
            return self.constant_bytes
        return self.constant_bytes + sum(
            max(0, getattr(told, f"{what}_size_in_bytes", 0))
            for what in ("generated_code", "temp", "output")
        )

    @functools.cached_property
    def on_host(self) -> bool:
        """Whether it runs on one device, which is the host."""
        devices = self.compiled.runtime_executable().local_devices()
        return len(devices) == 1 and devices[0].platform == "cpu"

    @property
    def waits(self) -> bool:
        """Whether a call of ``to_host`` is over when it returns."""
        return self.to_host is not self.function

    @functools.cached_property
    def flops(self) -> float:
        """Floating point operations of a call, by XLA's cost analysis; NaN if it tells none."""
        try:
            told = self.compiled.cost_analysis() or {}
        except (NotImplementedError, jax.errors.JaxRuntimeError):
            return math.nan  # a count that cannot be had must not fail a call
        return float(told.get("flops", math.nan))

    def run(
        self, sizes: object, args: Sequence[Any], kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> Any:
        """Call it with padded arguments; its results are padded.

        Args:
            sizes: The logical sizes, see `sizes_argument`; not looked at if it is exact.
            args: The positional arguments, padded, static ones left out.
            kwargs: The keyword arguments, likewise.

        Raises:
            SignatureChanged: The static leaves are not those it was built for.
        """
        if self.exact:
            result = self.function(*args, **kwargs)
        else:
            result = self.function(sizes, *args, **kwargs)
        if self.count_signatures() != self.signatures:
            self.note_compiles(args, kwargs)
        return result

    def finisher(self, call: ResolvedCall, out: Out) -> Change | None:
        """What cuts its results to their logical sizes; None where nothing needs to be done.

        Args:
            call: The call. It is not kept.
            out: The form of results.
        """
        logical = {o.position: o.logical(*call.ordered) for o in self.outs}
        padded = {o.position: o.padded for o in self.outs}
        weak = {o.position: o.weak_type for o in self.outs}
        finish = finisher(self.out_tree, logical, padded, weak, out)
        nested = call.size_constants.out_tree
        if nested is None:
            return finish
        return lambda result: nested.unflatten(result if finish is None else finish(result))

    def note_compiles(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Tell of the compile that arguments placed in a new way have cost."""
        self.signatures = self.count_signatures()
        leaves = jax.tree_util.tree_leaves((args, dict(kwargs)))
        placement = tuple(map(_placement, leaves))
        is_new = placement not in self._placements
        self._placements.add(placement)
        if is_new and self.on_compile is not None:
            self.on_compile(self)


def _placement(leaf: Any, padded: bool = False) -> tuple[Any, bool]:
    """What ``jit`` compiles a function once more for, types of the signature aside."""
    placed = isinstance(leaf, jax.ShapeDtypeStruct) or getattr(leaf, "committed", False)
    is_scalar = isinstance(leaf, int | float | complex) and not isinstance(leaf, bool | np.generic)
    weak = not padded and (is_scalar or bool(getattr(leaf, "weak_type", False)))
    return (leaf.sharding if placed else None), weak


class Origin(NamedTuple):
    """A call that an executable was first wanted for.

    Attributes:
        signed: The call, its arrays replaced by their types.
        tokens: A token per axis of each leaf; None where no axes are open.
        sizes: Its logical sizes, or those of the call that it is a part of (`ResolvedCall.whole`).
    """

    signed: SignedCall
    tokens: Tokens | None
    sizes: Mapping[str, int]


class OpenOut(NamedTuple):
    """An output with open axes.

    Attributes:
        position: Among the leaves of the result.
        logical: Its logical shape, of the logical sizes.
        padded: Its padded shape.
        weak_type: JAX's weak type.
    """

    position: int
    logical: Callable[..., tuple[int, ...]]
    padded: tuple[int, ...]
    weak_type: bool


def sizes_argument(
    call: ResolvedCall, size_constant_shapes: Sequence[tuple[int, ...]], poison: int | None = None
) -> Any:
    """What an executable takes before the arguments of the call.

    An int32 vector: the logical sizes, and in a checked call the index of a poison; with the
    constants that depend on the logical sizes, if the program has any.
    """
    vector = np.array([*call.ordered, *(() if poison is None else (poison,))], np.int32)
    if not size_constant_shapes:
        return vector
    return vector, tuple(map(pad, call.size_constants.values, size_constant_shapes))


def arguments_with(entry: Executable, signed: SignedCall, kind: str | None) -> list[Any]:
    """The arrays of a call padded with a poison, or as they came for None; sizes left out."""
    leaves = list(signed.leaves)
    if kind is not None:
        for i, shape in entry.pads:
            leaves[i] = pad_poisoned(leaves[i], shape, kind)
    types = signed.signature.types
    return [x for x, t in zip(leaves, types, strict=True) if t.dtype is not None]


def run_poisoned(
    entry: Executable, signed: SignedCall, call: ResolvedCall, which: int, out: Out
) -> Any:
    """Run an executable built with poison, on arguments padded with the poison ``which``."""
    leaves = list(signed.leaves)
    for i, shape in entry.pads:
        leaves[i] = pad_poisoned(leaves[i], shape, POISONS[which])
    args, kwargs = signed.tree.unflatten(leaves)
    sizes = sizes_argument(call, entry.size_constant_shapes, which)
    result = entry.run(sizes, args, kwargs)
    finish = entry.finisher(call, out)
    return result if finish is None else finish(result)
