"""What the cache stores: an executable for one bucket, with its argument and result shapes."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr

from bucketjit._arrays.padded import Padded
from bucketjit._arrays.padding import pad
from bucketjit._arrays.results import Change, at_leaves, finisher
from bucketjit._config import Out
from bucketjit._ir.interface import Interface
from bucketjit._ir.program import Program
from bucketjit._jax.compiler import run_once, signature_counter
from bucketjit._jax.jaxprs import CALLBACKS, all_equations, bodies, open_jaxpr
from bucketjit._tracing.call import Call
from bucketjit._tracing.computed.sizes import Selected, counts_of, finisher_of_counts


class SignatureChanged(Exception):
    """An executable was called with arguments of other types than it was built for.

    Raised inside ``jit``'s retrace, before anything runs or is donated. So the C++ code of ``jit``
    checks the argument types, and no Python code has to at every call.
    """


Pads = tuple[tuple[int, tuple[int, ...]], ...]
"""Position among the leaves and padded shape of each argument with open axes."""


@dataclass(eq=False)
class Executable:
    """One compiled program for one bucket, or for one exact shape.

    Attributes:
        sizes: Size of each dimension variable it is compiled for.
        exact: Whether it runs unpadded.
        function: The jitted function; takes the sizes (if not exact), then the arguments.
        compiled: The XLA executable behind it, as ``lower().compile()`` returns it.
        compile_seconds: Seconds that building it took, or reading it from a file.
        out_tree: Tree of the outputs.
        compiles: The jitted function that compiles for argument types new to ``function``.
        pads: Position among the leaves and padded shape of each argument with open axes.
        outs: The outputs with open axes.
        size_constant_shapes: Padded shape of each constant that depends on the logical sizes.
        reused_leaves: Positions of the donated leaves with open axes whose memory, or that of the
            padded copy, results take.
        constant_bytes: Bytes of the arrays that the program closes over.
        on_compile: Called after each compile but the first: like any jitted function, it compiles
            once more for arguments that are committed to a device where earlier ones were not.
        loaded: Whether it was read from a file instead of compiled; see `bucketjit._compile.files`.
        checked: Whether a result of it was found to equal the unpadded run (`Check.EXACT`).
        origin: The call that it was first needed for, without its arrays; None if not known.
        open_outs: Positions of the results with open axes, where it runs exact and there is no
            program to say so. None until they are first asked for; see
            `bucketjit._runtime.runs`.
        rows: How many examples it takes at once, each a row of its arguments and results; None if
            it takes one, not in a batch. Its ``pads`` are then the shapes of whole batches, and
            ``outs`` have the logical shapes of one row.
        in_turn: Whether these rows are computed one after the other, so that none is padding.
        placed: The shardings of the leaves that the user's ``in_shardings`` place: ``jit`` puts
            their padded copies there, wherever the arrays were.
        asked: Whether a warm-up asked for this number of rows.
        counted: The program, if the executable returns counts of computed sizes after the results;
            see `bucketjit._tracing.computed.sizes`.
        count_signatures: Returns how many argument signatures, placement included, it has now.
        signatures: How many it had when they were last counted.
    """

    sizes: Mapping[str, int]
    exact: bool
    function: Callable[..., Any]
    compiled: Any
    compile_seconds: float
    out_tree: Any
    compiles: Callable[..., Any]
    pads: Pads = ()
    outs: tuple[OpenOut, ...] = ()
    size_constant_shapes: tuple[tuple[int, ...], ...] = ()
    reused_leaves: frozenset[int] = frozenset()
    constant_bytes: int = 0
    on_compile: Callable[[Executable], None] | None = None
    loaded: bool = False
    origin: Call | None = None
    checked: bool = False
    open_outs: tuple[int, ...] | None = None
    counted: Interface | None = None
    rows: int | None = None
    in_turn: bool = False
    placed: Mapping[int, Any] = field(default_factory=dict)
    asked: bool = False

    def __post_init__(self) -> None:
        """Ask the jitted function what it can do."""
        self.count_signatures = signature_counter(self.compiles)
        self.signatures = self.count_signatures()
        # The placements that were compiled for. A loaded executable was compiled for none here, and
        # None equals no placement.
        self._placements: set[Any] = {None}

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of memory that it takes: code, temporaries, results, and the arrays it closes over.

        By XLA's memory analysis, which on CPU leaves out the code, some 4-9 MB.
        """
        return self.constant_bytes + sum(self.memory.values()) - self.memory.get("arguments", 0)

    @functools.cached_property
    def memory(self) -> Mapping[str, int]:
        """Bytes on a device by XLA's memory analysis; a donated argument is counted as a result."""
        analysis = self.compiled.memory_analysis()
        if analysis is None:
            return {}
        sizes = {
            what: max(0, getattr(analysis, f"{name}_size_in_bytes", 0))
            for what, name in _MEMORY.items()
        }
        sizes["arguments"] -= min(sizes["arguments"], sizes.pop("donated"))
        return sizes

    @functools.cached_property
    def on_host(self) -> bool:
        """Whether it runs on one device, and that device is the host CPU."""
        devices = self.compiled.runtime_executable().local_devices()
        return len(devices) == 1 and devices[0].platform == "cpu"

    @property
    def is_checked_after_runs(self) -> bool:
        """Whether the sizes that a run computes may say that its results are to be dropped."""
        return self.counted is not None and self.counted.is_checked_after_runs

    @functools.cached_property
    def padded_elements(self) -> int:
        return sum(math.prod(shape) for _, shape in self.pads)

    @functools.cached_property
    def flops(self) -> float:
        """Floating point operations of a call by XLA's cost analysis; NaN if that has no number."""
        try:
            costs = self.compiled.cost_analysis() or {}
        except (NotImplementedError, jax.errors.JaxRuntimeError):
            return math.nan  # the number is optional: its lack must not fail a call
        return float(costs.get("flops", math.nan))

    def run(
        self, sizes: object, args: Sequence[Any], kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> Any:
        """Call it with padded arguments. The results are padded."""
        if self.exact:
            result = self.function(*args, **kwargs)
        else:
            result = self.function(sizes, *args, **kwargs)
        if self.count_signatures() != self.signatures:
            self.note_compiles(args, kwargs)
        return result

    @functools.cached_property
    def _padded_outs(self) -> tuple[Mapping[int, tuple[int, ...]], Mapping[int, bool]]:
        padded = {o.position: o.padded for o in self.outs}
        return padded, {o.position: o.weak_type for o in self.outs}

    def finisher(self, call: Call, out: Out, observer: Selected | None = None) -> Change | None:
        """A function that cuts results to their logical sizes; None if there is nothing to cut.

        A handler keeps it, so it must not refer to the call, which has the arguments.
        """
        ordered, outs, tree, program = call.ordered, self.outs, self.out_tree, self.counted

        def finisher_at(computed: Sequence[int]) -> Change | None:
            logical = {o.position: o.logical(*ordered, *computed) for o in outs}
            return finisher(tree, logical, *self._padded_outs, out)

        if program is None:
            finish, nested = finisher_at(()), call.size_constants.out_tree
            if nested is None:
                return finish
            return lambda result: nested.unflatten(result if finish is None else finish(result))

        def later(wait: Callable[[], Sequence[int]]) -> Change | None:
            return at_leaves(tree, {o.position: as_padded_later(o, wait) for o in outs})

        def as_padded_later(out: OpenOut, wait: Callable[[], Sequence[int]]) -> Change:
            return lambda value: Padded.of_result(value, lambda: out.logical(*ordered, *wait()))

        waits = out is not Out.PADDED or program.is_checked_after_runs
        sizes = dict(zip(call.variables, ordered, strict=True))
        counts = counts_of(program, sizes, observer)
        return finisher_of_counts(counts, finisher_at, None if waits else later)

    def expect(self, args: Sequence[Any]) -> None:
        """Take a placement for that of the compile."""
        self._placements.add(tuple(map(_placement, args)))

    def note_compiles(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Call ``on_compile`` if ``jit`` has compiled again, for arguments placed in a new way."""
        self.signatures = self.count_signatures()
        leaves = jax.tree_util.tree_leaves((args, dict(kwargs)))
        placement = tuple(map(_placement, leaves))
        is_new = placement not in self._placements
        self._placements.add(placement)
        if is_new and self.on_compile is not None:
            self.on_compile(self)


def _placement(leaf: Any) -> tuple[Any, bool]:
    """The sharding and the weak type of a leaf: where they differ, ``jit`` compiles once more."""
    placed = isinstance(leaf, jax.ShapeDtypeStruct) or getattr(leaf, "committed", False)
    is_scalar = isinstance(leaf, int | float | complex) and not isinstance(leaf, bool | np.generic)
    weak = is_scalar or bool(getattr(leaf, "weak_type", False))
    return (leaf.sharding if placed else None), weak


_MEMORY = {
    **{"arguments": "argument", "donated": "alias", "results": "output"},
    **{"temporary": "temp", "code": "generated_code"},
}


class OpenOut(NamedTuple):
    """An output with open axes: its position, its logical shape by sizes, its padded one."""

    position: int
    logical: Callable[..., tuple[int, ...]]
    padded: tuple[int, ...]
    weak_type: bool


def sizes_argument(
    call: Call, size_constant_shapes: Sequence[tuple[int, ...]], poison: int | None = None
) -> Any:
    """The first argument of an executable that is not exact: what it needs to know of the sizes."""
    vector = np.array([*call.ordered, *(() if poison is None else (poison,))], np.int32)
    if not size_constant_shapes:
        return vector
    return vector, tuple(map(pad, call.size_constants.values, size_constant_shapes))


def arguments_with(entry: Executable, call: Call, kind: str | None) -> list[Any]:
    """The flat array arguments of a call, padded with a poison. Size arguments are left out."""
    leaves = call.leaves if kind is None else _poisoned(entry, call, kind)
    types = call.signature.types
    return [x for x, t in zip(leaves, types, strict=True) if t.dtype is not None]


def _poisoned(entry: Executable, call: Call, kind: str) -> list[Any]:
    from bucketjit._masking.checks import pad_poisoned

    leaves = list(call.leaves)
    for i, shape in entry.pads:
        leaves[i] = pad_poisoned(leaves[i], shape, kind)
    return leaves


def run_poisoned(entry: Executable, call: Call, which: int, out: Out) -> Any:
    """Run an executable that was built with poison, on arguments padded with the same poison."""
    from bucketjit._masking.checks import POISONS

    args, kwargs = call.tree.unflatten(_poisoned(entry, call, POISONS[which]))
    sizes = sizes_argument(call, entry.size_constant_shapes, which)
    result = entry.run(sizes, args, kwargs)
    finish = entry.finisher(call, out)
    return result if finish is None else finish(result)


# --- the first run ---

# XLA's CPU backend sets up a matrix multiplication when it first runs it, in about a millisecond:
# the first call of a 6-layer encoder takes 45 ms longer than the next ones. An executable that is
# compiled before a call needs it can get this setup done beforehand.

# Some tenths of a second. In a longer run, the setup is too small a part to be noticed.
_MOST_FLOPS = 1e10
_MOST_BYTES = 2**30  # of temporaries and results, which come on top of those of calls

# On zeros a loop may not end, and callbacks would pass made-up values to the user's code. XLA's
# cost analysis does not count what LAPACK does. A collective waits for other processes; most have
# effects besides.
_NOT_ON_ZEROS = {
    *("while", *CALLBACKS),
    *("cholesky", "eig", "eigh", "geqrf", "geqp3", "householder_product", "hessenberg", "lu"),
    *("ormqr", "qr", "schur", "svd", "symmetric_product", "triangular_solve", "tridiagonal"),
    *("tridiagonal_solve", "shard_mean", "shard_psum"),
}
_SIZES, _FIRST_SIZE = 0, 1  # position of the logical sizes; a valid size: programs may assume >= 1


def run_first(entry: Executable, program: Program) -> None:
    """Run an executable of a bucket on zeros, if that is harmless and quick.

    It runs on the host only, up to 10 GFLOP and 1 GiB of memory besides its arguments, and only for
    programs without effects, callbacks, ``while_loop`` and LAPACK. All errors are suppressed: the
    call that needs the executable will meet them.
    """
    with contextlib.suppress(Exception):
        if not entry.on_host or entry.nbytes > _MOST_BYTES:
            return
        jaxpr, _ = open_jaxpr(program.jaxpr)
        steps = _steps(jaxpr, max(entry.sizes.values()))
        # XLA counts one step of a loop.
        if not entry.flops * steps <= _MOST_FLOPS or not _runs_on_zeros(jaxpr):
            return
        run_once(entry.compiled, lambda i, aval: _filled(aval, _FIRST_SIZE if i == _SIZES else 0))


def _runs_on_zeros(jaxpr: Jaxpr) -> bool:
    """Whether running a program on zeros ends, and does nothing that can be observed."""
    names = {eqn.primitive.name for eqn in all_equations(jaxpr)}
    return not jaxpr.effects and names.isdisjoint(_NOT_ON_ZEROS)


def _steps(jaxpr: Jaxpr, most: int) -> int:
    """How often the innermost ``scan`` runs; a scan over an open axis counts as ``most`` steps."""
    most_steps = 1
    for eqn in jaxpr.eqns:
        length = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        inner = [_steps(body, most) for body in bodies(eqn)]
        most_steps = max(
            most_steps, (length if isinstance(length, int) else most) * max(inner, default=1)
        )
    return most_steps


def _filled(aval: Any, value: int) -> np.ndarray:
    """An array of one value. Zeros take no memory until they are written to."""
    dtype = np.dtype(aval.dtype)
    # XLA copies a host array that is not aligned to 64 bytes.
    raw = np.zeros(int(np.prod(aval.shape, dtype=np.int64)) * dtype.itemsize + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    array = raw[begin : raw.size - 64 + begin].view(dtype).reshape(aval.shape)
    if value:
        array[...] = value
    return array
