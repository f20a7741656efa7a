"""Build what the cache holds: one jitted function per bucket, together with its executable.

One jit object *per bucket*: executables of a shared one are not freed while it lives.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from bucketjit import _jax
from bucketjit._axes import STATIC
from bucketjit._check import POISONS, Check, pad_poisoned, poison_equations
from bucketjit._dims import BucketSizes, is_symbolic, shape_function, upper_bound_text
from bucketjit._errors import MaskingError, first_line
from bucketjit._family import Call, Family, Tokens
from bucketjit._interpret import interpret
from bucketjit._padded import Padded
from bucketjit._padding import pad
from bucketjit._results import Change, Out, finisher
from bucketjit._rule import RuleTable, select
from bucketjit._signing import Signed


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
        pads: Position among the leaves and padded shape of each argument with open axes.
        outs: The outputs with open axes.
        leak_shapes: Padded shape of each constant that depends on the logical sizes.
        donated_leaves: Positions of the leaves with open axes whose padded copy is donated.
        constant_bytes: Memory of the arrays that the program closes over.
        on_compile: Told the seconds of each compile after the first: like any jitted function,
            it is compiled once more for arguments that are committed to a device where those
            before were not.
        fresh: The jitted function that ``function`` hands calls over to which it does not take;
            None where it is that itself, which is so unless it was read from a file.
        origin: The call that it was first wanted for, without its arrays; None if not known.
        signatures: How many signatures of arguments, placement included, it knows.
    """

    sizes: Mapping[str, int]
    exact: bool
    function: Callable[..., Any]
    compiled: Any
    compile_seconds: float
    out_tree: Any
    pads: tuple[tuple[int, tuple[int, ...]], ...] = ()
    outs: tuple[OpenOut, ...] = ()
    leak_shapes: tuple[tuple[int, ...], ...] = ()
    donated_leaves: frozenset[int] = frozenset()
    constant_bytes: int = 0
    on_compile: Callable[[float], None] | None = None
    fresh: Callable[..., Any] | None = None
    origin: Origin | None = None

    def __post_init__(self) -> None:
        compiles = self.function if self.fresh is None else self.fresh
        self.count_signatures = _jax.signature_counter(compiles)
        self.signatures = self.count_signatures()
        # What was compiled beforehand serves the first placement; nothing was if it was loaded.
        self._placements: set[Any] = {None}
        if self.origin is not None and not self.loaded:
            padded = {i for i, _ in self.pads}
            made_for = enumerate(self.origin.signed.leaves)
            self._placements = {tuple(_placement(x, i in padded) for i, x in made_for)}

    @property
    def loaded(self) -> bool:
        """Whether it was read from a file, and not compiled; see `bucketjit._persistence`."""
        return self.fresh is not None

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

    @functools.cached_property
    def flops(self) -> float:
        """Floating point operations of a call, by XLA's cost analysis; NaN if it tells none."""
        try:
            told = self.compiled.cost_analysis() or {}
        except (NotImplementedError, jax.errors.JaxRuntimeError):
            return math.nan  # a count that cannot be had must not fail a call
        return float(told.get("flops", math.nan))

    def run(
        self, sizes: Any, args: Sequence[Any], kwargs: Mapping[str, Any] = MappingProxyType({})
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

    def finisher(self, ordered: Sequence[int], out: Out) -> Change | None:
        """What cuts its results to their logical sizes; None where nothing needs to be done.

        Args:
            ordered: Logical sizes, in the order of `Call.variables`.
            out: The form of results.
        """
        logical = {o.position: o.logical(*ordered) for o in self.outs}
        padded = {o.position: o.padded for o in self.outs}
        weak = {o.position: o.weak_type for o in self.outs}
        return finisher(self.out_tree, logical, padded, weak, out)

    def note_compiles(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Tell of the compile that arguments placed in a new way have cost."""
        self.signatures = self.count_signatures()
        leaves = jax.tree_util.tree_leaves((args, dict(kwargs)))
        placement = tuple(map(_placement, leaves))
        if placement not in self._placements and self.on_compile is not None:
            self.on_compile(0.0)
        self._placements.add(placement)


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
        sizes: Its logical sizes.
    """

    signed: Signed
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


def padded_leaf_shapes(
    call: Call, family: Family, bucket: Mapping[str, int], shapes: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Position and padded shape of each leaf that has open axes."""
    assert call.program is not None
    lower = {v: call.program.lower.get(v, 1) for v in bucket}
    found = []
    for i, (row, shape, kind) in enumerate(zip(call.tokens, shapes, family.types, strict=True)):
        if kind.dtype is not None and any(t != STATIC and not t.isdigit() for t in row):
            padded = tuple(
                n if t == STATIC or t.isdigit() else upper_bound_text(t, lower, bucket)
                for t, n in zip(row, shape, strict=True)
            )
            found.append((i, padded))
    return tuple(found)


def build_masked(made: Masked) -> Executable:
    """Compile a program for a bucket.

    Of the arguments only types and placement are looked at, so the call may be long over.

    Raises:
        MaskingError: The program cannot be masked.
        Exception: Whatever ``jit`` raises for these arguments, such as arrays on two devices.
    """
    began = time.perf_counter()
    lowered = made.function.lower(made.sizes, *made.args, **made.kwargs)
    compiled = lowered.compile()
    padded_outs = [tuple(x.shape) for x in jax.tree_util.tree_leaves(lowered.out_info)]
    return masked_executable(made, made.function, compiled, padded_outs, began)


class Masked(NamedTuple):
    """A program as a function of padded arguments, not yet compiled.

    Attributes:
        function: The jitted function.
        sizes, args, kwargs: What to lower it for.
        expected: Refuses arguments of other types.
        at: The padded sizes.
        call: The call that asks for it.
        origin: The same call, to be remembered.
        bucket, pads, leak_shapes, donated, donated_leaves: See `Executable` and `masked_function`.
        options: Options of XLA.
    """

    function: Any
    sizes: Any
    args: Any
    kwargs: Any
    expected: Expected
    at: BucketSizes
    call: Call
    origin: Origin
    bucket: Mapping[str, int]
    pads: tuple[tuple[int, tuple[int, ...]], ...]
    leak_shapes: tuple[tuple[int, ...], ...]
    donated: frozenset[int]
    donated_leaves: frozenset[int]
    options: Mapping[str, Any]


def masked_function(
    signed: Signed,
    call: Call,
    bucket: Mapping[str, int],
    pads: tuple[tuple[int, tuple[int, ...]], ...],
    rules: Callable[[], RuleTable],
    check: Check,
    options: Mapping[str, Any],
) -> Masked:
    """The function that `build_masked` compiles. Traces nothing.

    Args:
        signed: The call that asks for it.
        call: The same call, resolved: its sizes and its program.
        bucket: Padded size of each variable, those of the program's own included.
        pads: Position and padded shape of each leaf with open axes.
        rules: Gives the rule table when it is traced: importing it takes 50 ms.
        check: `Check.POISON` overwrites the padding of every equation; the executable then takes
            the index of the poison behind the sizes. Checked calls run twice, so nothing that
            they are given is donated.
        options: Options of XLA.
    """
    program, family = call.program, signed.family
    assert program is not None
    variables = call.variables
    poisoned = check is Check.POISON
    expected = Expected({i for i, _ in pads})
    is_size = [t.dtype is None for t in family.types]

    def masked(sizes: Any, *args: Any, **kwargs: Any) -> Any:
        leaves = expected.check(args, kwargs)
        arrays = [x for x, size in zip(leaves, is_size, strict=True) if not size]
        vector, leaks = sizes if isinstance(sizes, tuple) else (sizes, ())
        values = {v: vector[i] for i, v in enumerate(variables)}
        at = BucketSizes(bucket, program.lower, values, leaks)
        after = poison_equations(vector[len(variables)]) if poisoned else None
        padding = 0 if check is not Check.POISON else None  # what `pad` writes
        try:
            outs = interpret(program.jaxpr, program.consts, arrays, at, rules(), after, padding)
        except (MaskingError, FloatingPointError):  # jax_debug_nans runs it step by step
            raise
        except Exception as error:
            raise MaskingError(
                f"the masked program does not build: {type(error).__name__}: {first_line(error)}",
                "this is a defect of a masking rule; leave the axis static until it is mended",
                is_defect=True,
            ) from error
        return program.out_tree.unflatten(
            _finish(out, shape, kind, at)
            for out, shape, kind in zip(outs, program.out_shapes, program.out_types, strict=True)
        )

    masked.__name__ = getattr(family.fn, "__name__", "masked")
    args, kwargs = signed.tree.unflatten(_abstract(signed, dict(pads)))
    static = BucketSizes(bucket, program.lower, {})
    donated: frozenset[int] = frozenset()
    donated_leaves: frozenset[int] = frozenset()
    if signed.donate and check is Check.OFF:
        made = Counter(
            (static.padded_shape(shape), dtype)
            for shape, (dtype, _) in zip(program.out_shapes, program.out_types, strict=True)
        )
        donated, donated_leaves = _to_donate(signed, dict(pads), made)
    leak_shapes = tuple(map(static.padded_shape, program.leak_shapes))
    return Masked(
        function=jax.jit(
            masked,
            donate_argnums=tuple(i + 1 for i in sorted(donated)),
            compiler_options=dict(options),
        ),
        sizes=sizes_argument(call, leak_shapes, 0 if poisoned else None),
        args=args,
        kwargs=kwargs,
        expected=expected,
        at=static,
        call=call,
        origin=Origin(signed, call.tokens, call.sizes),
        bucket=bucket,
        pads=pads,
        leak_shapes=leak_shapes,
        donated=donated,
        donated_leaves=donated_leaves,
        options=options,
    )


def masked_executable(
    made: Masked,
    function: Callable[..., Any],
    compiled: Any,
    padded_outs: Sequence[tuple[int, ...]],
    began: float,
    fresh: Callable[..., Any] | None = None,
) -> Executable:
    """What the cache holds of a masked function.

    Args:
        made: The masked function.
        function: What is called: its jitted form, or a loaded one.
        compiled: The executable behind it.
        padded_outs: Padded shape of each output.
        began: When building it began (``time.perf_counter``).
        fresh: See `Executable`.
    """
    program = made.call.program
    assert program is not None
    outs = tuple(
        OpenOut(i, shape_function(shape, made.call.variables), padded_outs[i], weak)
        for i, (shape, (_, weak)) in enumerate(
            zip(program.out_shapes, program.out_types, strict=True)
        )
        if any(map(is_symbolic, shape))
    )
    return Executable(
        sizes=dict(made.bucket),
        exact=False,
        function=function,
        compiled=compiled,
        compile_seconds=time.perf_counter() - began,
        out_tree=program.out_tree,
        pads=made.pads,
        outs=outs,
        leak_shapes=made.leak_shapes,
        donated_leaves=made.donated_leaves,
        constant_bytes=sum(getattr(c, "nbytes", 0) for c in program.consts),
        fresh=fresh,
        origin=made.origin,
    )


def sizes_argument(
    call: Call, leak_shapes: Sequence[tuple[int, ...]], poison: int | None = None
) -> Any:
    """What an executable takes before the arguments of the call.

    An int32 vector: the logical sizes, and in a checked call the index of a poison; with the
    constants that depend on the logical sizes, if the program has any.
    """
    vector = np.array([*call.ordered, *(() if poison is None else (poison,))], np.int32)
    if not leak_shapes:
        return vector
    return vector, tuple(map(pad, call.leaks.values, leak_shapes))


def build_exact(signed: Signed, sizes: Mapping[str, int], made: Exact) -> Executable:
    """Compile the function itself for one exact shape.

    Of the arguments only types and placement are looked at.

    Args:
        signed: The call that asks for it.
        sizes: Its sizes, for the statistics.
        made: Its function.

    Raises:
        Exception: Whatever ``jax.jit(fn)`` raises for these arguments.
    """
    began = time.perf_counter()
    lowered = made.function.lower(*made.args, **made.kwargs)
    compiled = lowered.compile()
    seconds = time.perf_counter() - began
    tree = jax.tree_util.tree_structure(lowered.out_info)
    origin = Origin(signed, None, {})
    return Executable(dict(sizes), True, made.function, compiled, seconds, tree, origin=origin)


class Exact(NamedTuple):
    """The function itself, for one exact shape, not yet compiled.

    Attributes:
        function: The jitted function.
        args, kwargs: What to lower it for.
        expected: Refuses arguments of other types.
        donated: Positions of the arguments that are donated.
        options: Options of XLA.
    """

    function: Any
    args: Any
    kwargs: Any
    expected: Expected
    donated: tuple[int, ...]
    options: Mapping[str, Any]


def exact_function(signed: Signed, check: Check, options: Mapping[str, Any]) -> Exact:
    """The function that `build_exact` compiles. Traces nothing.

    Checked calls donate nothing: they run twice.
    """
    fn = signed.family.fn
    static = {
        i: shape[0]
        for i, (shape, t) in enumerate(zip(signed.shapes, signed.family.types, strict=True))
        if t.dtype is None
    }

    expected = Expected(set())

    def exact(*args: Any, **kwargs: Any) -> Any:
        leaves = expected.check(args, kwargs)
        tree: Any = jax.tree_util.tree_structure((args, kwargs))
        for i, value in static.items():
            leaves[i] = value
        args, kwargs = tree.unflatten(leaves)
        return fn(*args, **kwargs)

    exact.__name__ = getattr(fn, "__name__", "exact")
    donated = tuple(signed.donate) if check is Check.OFF else ()
    args, kwargs = signed.tree.unflatten(_abstract(signed, {}))
    function = jax.jit(exact, donate_argnums=donated, compiler_options=dict(options))
    return Exact(function, args, kwargs, expected, donated, options)


def without_values(signed: Signed) -> Signed:
    """A call that keeps none of its arrays alive."""
    return dataclasses.replace(signed, leaves=_abstract(signed, {}))


def _abstract(signed: Signed, padded: Mapping[int, tuple[int, ...]]) -> list[Any]:
    """The leaves of a call as ``jit`` lowers for them: types and placement, no contents."""
    leaves: list[Any] = []
    for i, (x, kind) in enumerate(zip(signed.leaves, signed.family.types, strict=True)):
        if kind.dtype is None or isinstance(x, bool | int | float | complex):
            leaves.append(x)
            continue
        shape = padded.get(i, signed.shapes[i])
        array = x.array if isinstance(x, Padded) else x
        # Padding makes an array strongly typed, and the program was traced with its own type.
        weak = kind.weak_type and i not in padded
        sharding = getattr(array, "sharding", None)
        if isinstance(array, jax.Array) and not array.committed:
            sharding = None
        leaves.append(jax.ShapeDtypeStruct(shape, kind.dtype, sharding=sharding, weak_type=weak))
    return leaves


def arguments_with(entry: Executable, signed: Signed, kind: str | None) -> list[Any]:
    """The arrays of a call padded with a poison, or as they came for None; sizes left out."""
    leaves = list(signed.leaves)
    if kind is not None:
        for i, shape in entry.pads:
            leaves[i] = pad_poisoned(leaves[i], shape, kind)
    types = signed.family.types
    return [x for x, t in zip(leaves, types, strict=True) if t.dtype is not None]


def run_poisoned(entry: Executable, signed: Signed, call: Call, which: int, out: Out) -> Any:
    """Run an executable built with poison, on arguments padded with the poison ``which``."""
    leaves = list(signed.leaves)
    for i, shape in entry.pads:
        leaves[i] = pad_poisoned(leaves[i], shape, POISONS[which])
    args, kwargs = signed.tree.unflatten(leaves)
    sizes = sizes_argument(call, entry.leak_shapes, which)
    result = entry.run(sizes, args, kwargs)
    finish = entry.finisher(call.ordered, out)
    return result if finish is None else finish(result)


class Expected:
    """The argument types an executable was first traced with; a retrace must see them again.

    Weak types of padded arguments are left out: padding makes them strong, and the program was
    traced with the types of the signature.
    """

    def __init__(self, padded: set[int]) -> None:
        self._padded = padded
        self._first: Any = None

    def check(self, args: Any, kwargs: Any) -> list[Any]:
        """Take the types of the first arguments, and hold later ones to them.

        Args:
            args: Positional arguments: arrays, tracers, or ``ShapeDtypeStruct``s.
            kwargs: Keyword arguments.

        Returns:
            The leaves.

        Raises:
            SignatureChanged: They are others.
        """
        if _jax.jit_disabled():
            raise SignatureChanged
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        types = map(jax.typeof, leaves)
        now = (
            tree,
            _jax.trace_context(),
            tuple(
                (x.shape, x.dtype, i not in self._padded and getattr(x, "weak_type", False))
                for i, x in enumerate(types)
            ),
        )
        if self._first is None:
            self._first = now
        elif self._first != now:
            raise SignatureChanged
        return leaves


def _to_donate(
    signed: Signed, pads: Mapping[int, tuple[int, ...]], made: Counter[Any]
) -> tuple[frozenset[int], frozenset[int]]:
    """Which arguments to donate, and which leaves of them have open axes.

    JAX warns of a donated buffer that no output can reuse. The user has donated arguments without
    open axes and is told; whether the padded copy of another can be reused is found out here.

    Args:
        signed: The call.
        pads: Padded shape of each leaf with open axes.
        made: How many outputs there are of each padded shape and dtype.
    """
    args, _ = signed.tree.unflatten(range(len(signed.leaves)))
    spare = Counter(made)
    donated, donated_leaves = set(), set()
    leaves_of = {i: jax.tree_util.tree_leaves(args[i]) for i in signed.donate}
    # Those that are donated whatever the others do have the first choice.
    for i in sorted(signed.donate, key=lambda i: any(leaf in pads for leaf in leaves_of[i])):
        wanted = Counter(
            (pads.get(leaf, signed.shapes[leaf]), signed.family.types[leaf].dtype)
            for leaf in leaves_of[i]
        )
        opened = [leaf for leaf in leaves_of[i] if leaf in pads]
        if not opened or wanted <= spare:
            spare -= wanted
            donated.add(i)
            donated_leaves.update(opened)
    return frozenset(donated), frozenset(donated_leaves)


def _finish(out: Any, shape: tuple[Any, ...], kind: tuple[Any, bool], sizes: BucketSizes) -> Any:
    """Zeros into padding that leaves the executable; the weak type as traced."""
    dtype, weak = kind
    mask = sizes.in_bounds(shape)
    if mask is not None:
        out = select(mask, out, 0)
    return _jax.with_type(out, dtype, weak)
