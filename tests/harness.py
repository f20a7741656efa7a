"""Run a case padded and exact, with poisoned padding, and compare.

A case is data (`Case`): a function, the shapes of its arguments with dimension variables, and
the primitives it covers. The harness traces it once with symbolic sizes, interprets it at a
bucket with every padding poisoned (arguments, and the outputs of every single equation), and
compares the logical part with the plain run at each logical size.
"""

import functools
import itertools
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from bucketjit._compile.workarounds import hooks, workarounds
from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._ir.expressions import evaluate, evaluate_text, is_symbolic, variables_of
from bucketjit._ir.program import Leaf, TraceRefused
from bucketjit._jax.jaxprs import is_jaxpr, open_jaxpr
from bucketjit._masking.interpreter import Hook, interpret
from bucketjit._masking.rules import default_rules
from bucketjit._tracing.concrete import Tracer
from bucketjit._tracing.pairing import pair
from bucketjit._tracing.symbolic import trace


@dataclass(frozen=True)
class Arg:
    """One argument of a case.

    Attributes:
        shape: Sizes separated by commas; dimension variables and expressions are symbolic.
        dtype: NumPy dtype name, or ``"key"`` for typed PRNG keys.
        low, high: Range of integer contents, ``high`` exclusive; text is an expression of the
            sizes (``"s"`` for valid indices into an axis of size s).
        make: Turns random contents into what the case needs (such as a positive definite
            matrix); gets the array and a NumPy generator.
    """

    shape: str
    dtype: str = "float32"
    low: int | str = -5
    high: int | str = 6
    make: Callable[[Any, np.random.Generator], Any] | None = None

    @property
    def sizes(self) -> list[str]:
        return [s.strip() for s in self.shape.split(",")] if self.shape.strip() else []


@dataclass(frozen=True)
class Case:
    """A function, its arguments, and the primitives whose rules it exercises.

    Attributes:
        name: Unique name.
        fn: Function of the arguments, returning a pytree of arrays.
        args: `Arg`s, or shapes as text for float32.
        covers: Names of primitives; the traced program must contain each of them.
        buckets: Padded size per variable; ``{"b": 4, "s": 8}`` where not given (other names 4).
        sizes: Logical sizes to run at; by default 1, edge - 1 and edge of the bucket.
        grad: Also compare the gradient of a scalar of the outputs for every float argument.
        domains: Value domains of float inputs, see `DOMAINS`.
        rtol, atol: Tolerance for floats. Integers and booleans are compared exactly.
        constraints: Given to the tracer, such as ``("s >= 3",)``.
        slow: It runs in the sweeps alone, since it takes seconds.
        eager: The plain run is without ``jit``, which cannot trace what computes sizes.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Arg | str, ...]
    covers: tuple[str, ...] = ()
    buckets: Mapping[str, int] | None = None
    sizes: tuple[Mapping[str, int], ...] | None = None
    grad: bool = False
    domains: tuple[str, ...] = ("mixed", "negative", "positive")
    rtol: float = 2e-5
    atol: float = 2e-5
    constraints: tuple[str, ...] = ()
    eager: bool = False
    slow: bool = False

    @property
    def arguments(self) -> list[Arg]:
        return [a if isinstance(a, Arg) else Arg(a) for a in self.args]

    @property
    def variables(self) -> list[str]:
        texts = [t for a in self.arguments for t in a.sizes if not t.isdigit()]
        return sorted({v for t in texts for v in variables_of(t)})

    @property
    def bucket(self) -> dict[str, int]:
        defaults = {"b": 4, "s": 8}
        return {v: (self.buckets or {}).get(v, defaults.get(v, 4)) for v in self.variables}

    @property
    def logical_sizes(self) -> list[dict[str, int]]:
        if self.sizes is not None:
            return [dict(s) for s in self.sizes]
        per = {v: [1, p - 1, p] for v, p in self.bucket.items()}
        rows = [{v: per[v][i] for v in per} for i in range(3)]
        if len(per) > 1:  # sizes that do not move together
            rows.append(
                {v: (max(1, p // 2), p)[k % 2] for k, (v, p) in enumerate(self.bucket.items())}
            )
        return rows


def arguments(text: str) -> list[Arg]:
    """The arguments in a text such as ``"b, s; int32[t] 0:b"``, separated by semicolons.

    Each is a shape of float32, or a dtype with its shape and, if it matters, what is drawn for it.
    """
    made = []
    for part in text.split(";"):
        typed = re.fullmatch(r"(\w+)\[(.*)\](?: (.+):(.+))?", part.strip())
        if typed is None:
            made.append(Arg(part.strip()))
        else:
            dtype, shape, low, high = typed.groups()
            made.append(Arg(shape, dtype) if low is None else Arg(shape, dtype, low, high))
    return made


def leaves_of(args: Sequence[Arg]) -> list[Leaf]:
    """What a function is traced with."""
    return [
        Leaf(
            f"arg{i}",
            tuple(int(t) if t.isdigit() else t for t in arg.sizes),
            jax.random.key(0).dtype if arg.dtype == "key" else jnp.dtype(arg.dtype),
        )
        for i, arg in enumerate(args)
    ]


def tree_of(leaves: Sequence[Leaf]) -> Any:
    """The tree of positional arguments that are leaves."""
    return jax.tree.structure((tuple(range(len(leaves))), {}))


def traced(fn: Callable[..., Any], args: str, *constraints: str, **sizes: int) -> Any:
    """The program of a function of arguments in a text, traced at sizes."""
    leaves = leaves_of(arguments(args))
    return trace(fn, tree_of(leaves), leaves, sizes, constraints)


def family(
    covers: str = "", prefix: str = "", **defaults: Any
) -> Callable[..., Callable[[str], Case]]:
    """Makes cases that cover these primitives, with these options where a case names no other.

    A case gets its name as an entry of a table, see `cases`. Where it names no arguments, it has a
    matrix of which both axes are open.
    """

    def case(
        fn: Callable[..., Any], *args: Arg | str, covers: str = covers, **options: Any
    ) -> Callable[[str], Case]:
        args = args or ("b, s",)
        every = [x for arg in args for x in ([arg] if isinstance(arg, Arg) else arguments(arg))]
        named = {**defaults, **options}
        return lambda name: Case(prefix + name, fn, tuple(every), tuple(covers.split()), **named)

    return case


def cases(table: Mapping[str, Callable[[str], Case]]) -> list[Case]:
    """The cases of a table, whose keys are their names without the prefix of their family."""
    return [make(name) for name, make in table.items()]


DOMAINS = ("mixed", "negative", "positive", "special")
# The last one is an index that is good, beside a NaN: what a padded row scatters shows.
POISONS = ("nan", "inf", "zero", "lowest", "index")
USUAL = (
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("float16", "bfloat16", "float32", "complex64"),
)


def _contents(
    arg: Arg, shape: tuple[int, ...], sizes: Mapping[str, int], domain: str, rng: Any
) -> Any:
    if arg.dtype == "key":
        key = jax.random.key(int(rng.integers(1 << 30)))
        return jax.random.split(key, shape) if shape else key
    dtype = jnp.dtype(arg.dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        data = rng.random(shape) < 0.5
    elif jnp.issubdtype(dtype, jnp.integer):
        low, high = (evaluate_text(str(x), sizes) for x in (arg.low, arg.high))
        data = rng.integers(low, max(high, low + 1), shape)
    else:
        data = rng.standard_normal(shape)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            data = data + 1j * rng.standard_normal(shape)
        elif domain == "negative":
            data = -np.abs(data) - 0.5
        elif domain == "positive":
            data = np.abs(data) + 0.5
        elif domain == "special":
            special = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0], shape)
            data = np.where(rng.random(shape) < 0.25, special, data)
    data = np.asarray(data).astype(dtype)
    return arg.make(data, rng) if arg.make is not None else data


def poison_value(dtype: Any, kind: str) -> Any:
    """The poison of this kind for a dtype."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return kind in ("nan", "inf")
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        extremes = {"nan": info.max, "inf": info.max - 1, "lowest": info.min}
        return {**extremes, "zero": 0, "index": 1}[kind]
    value = {"nan": np.nan, "inf": np.inf, "zero": 0.0, "lowest": -np.inf, "index": np.nan}[kind]
    return np.asarray(value).astype(dtype)


def poison_padding(x: Any, padded: tuple[int, ...], kind: str) -> Any:
    """Pad an argument on the host with poison of this kind."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(x))
        wide = np.full((*padded, *data.shape[x.ndim :]), poison_value(data.dtype, kind), data.dtype)
        wide[tuple(slice(0, n) for n in x.shape)] = data
        return jax.random.wrap_key_data(wide, impl=jax.random.key_impl(x))
    x = np.asarray(x)
    wide = np.full(padded, poison_value(x.dtype, kind), x.dtype)
    wide[tuple(slice(0, n) for n in x.shape)] = x
    return wide


@functools.cache
def poison_of(kind: str) -> dict[str, Any]:
    """The poison of this kind for the usual dtypes, by their names."""
    dtypes = map(jnp.dtype, USUAL)
    return {str(d): np.asarray(poison_value(d, kind)).astype(d) for d in dtypes}


def poison_equations(poison: Mapping[str, Any]) -> Callable[[], Hook]:
    """Makes a hook that overwrites the padding of every equation's outputs (see `poison_of`)."""

    def poisoned(out: Any, shape: Any, sizes: BucketSizes) -> Any:
        symbolic = [i for i, d in enumerate(shape) if is_symbolic(d)]
        if not symbolic or jax.dtypes.issubdtype(out.dtype, jax.dtypes.extended):
            return out
        real = [
            lax.broadcasted_iota(jnp.int32, out.shape, i) < sizes.logical(shape[i])
            for i in symbolic
        ]
        value = poison.get(str(out.dtype))
        if value is None:
            value = poison["int32" if jnp.issubdtype(out.dtype, jnp.integer) else "float32"]
        return jnp.where(functools.reduce(jnp.logical_and, real), out, value.astype(out.dtype))

    def after(eqn: Any, outs: list[Any], sizes: BucketSizes) -> list[Any]:
        return [
            poisoned(out, getattr(var.aval, "shape", ()), sizes)
            for var, out in zip(eqn.outvars, outs, strict=True)
        ]

    return lambda: after


class Masked:
    """A case traced once and compiled once per bucket, with the poison chosen at run time.

    Or without poison, as users run it: arguments come padded with zeros, which is made use of.
    """

    def __init__(
        self,
        case: Case,
        fn: Callable[..., Any],
        rules: Mapping[Any, Any] | None = None,
        poisoned: bool = True,
        paired: bool = False,
        room: int = 0,
    ) -> None:
        self.case = case
        self.rooms = {v: n + room for v, n in case.bucket.items()} if room else {}
        self.poisoned = poisoned
        self.paired = paired
        self.rules = default_rules() if rules is None else rules
        self.bucket = case.bucket
        self._programs: list[Any] = []
        self._tracer: Tracer | None = None
        self._compiled: dict[int, Any] = {}
        self.fn = fn

    def program(self, sizes: Mapping[str, int]) -> Any:
        for program in self._programs:
            if program.size_constants(sizes) is not None:
                return program
        leaves = leaves_of(self.case.arguments)
        given = (self.fn, tree_of(leaves), leaves, sizes, self.case.constraints)
        if self._tracer is None:
            self._tracer = Tracer(*given[:3])
        if self.paired:
            program = pair(self._tracer, *given[3:])
        else:
            try:
                program = trace(*given)
            except TraceRefused:
                program = pair(self._tracer, *given[3:])
        self._programs.append(program)
        return program

    def serves(self, sizes: Mapping[str, int]) -> bool:
        """Whether there is a program for these sizes."""
        try:
            self.program(sizes)
        except TraceRefused:
            return False
        return True

    def __call__(self, args: Sequence[Any], sizes: Mapping[str, int], poison: str) -> Any:
        program = self.program(sizes)
        size_constants = program.size_constants(sizes)
        assert size_constants is not None, "traced twice, two different programs"
        bucket = self.bucket
        rooms = self.rooms
        if program.pairing is not None or any(g.op == "==" for g in program.guards):
            rooms = {}
        if not program.admits(bucket):
            bucket, rooms = dict(sizes), {}
        there = program.unfitted_sizes(bucket) or {}
        for name, size in zip(program.unfitted, size_constants.sizes, strict=True):
            bucket[name] = max(size, there.get(name, 0))
        key = (id(program), tuple(bucket.items()))
        if key not in self._compiled:

            def run(values: Any, constants: Any, poison: Any, *padded: Any) -> Any:
                padded_sizes = program.padded_sizes(bucket)
                at = BucketSizes(padded_sizes, program.lower, values, constants, (), rooms)
                return interpret(
                    program.jaxpr,
                    program.consts,
                    padded,
                    at,
                    self.rules,
                    after=hooks(
                        poison_equations(poison) if self.poisoned else None,
                        workarounds(program.jaxpr).after(),
                    ),
                    padding=None if self.poisoned else 0,
                )

            self._compiled[key] = jax.jit(run)
        padded = []
        for arg, x in zip(self.case.arguments, args, strict=True):
            at = BucketSizes(bucket, program.lower, {}, rooms=rooms)
            dims = [
                int(t) if t.isdigit() else at.padded(*export.symbolic_shape(t)) for t in arg.sizes
            ]
            padded.append(poison_padding(x, tuple(dims), poison))
        known = {**sizes, **dict(zip(program.unfitted, size_constants.sizes, strict=True))}
        values = {v: np.int32(known[v]) for v in bucket}
        shapes = map(
            BucketSizes(bucket, program.lower, {}).padded_shape, program.size_constant_shapes
        )
        constants = [
            poison_padding(x, s, poison) for x, s in zip(size_constants.values, shapes, strict=True)
        ]
        outs = self._compiled[key](values, constants, poison_of(poison), *padded)
        cut = []
        for out, shape in zip(outs, program.out_shapes, strict=True):
            dims = tuple(evaluate(d, known) for d in shape)
            if jax.dtypes.issubdtype(out.dtype, jax.dtypes.prng_key):
                out = jax.random.key_data(out)
            cut.append(np.asarray(out)[tuple(slice(0, n) for n in dims)])
        return cut


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of sub-programs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree_util.tree_leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(value):
                yield from equations(open_jaxpr(value)[0])


def primitives_of(jaxpr: Any) -> set[str]:
    """Names of all primitives in a jaxpr, sub-programs included."""
    return {eqn.primitive.name for eqn in equations(jaxpr)}


def scalar_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A scalar that weighs every float output differently, to differentiate.

    The sine of a large number of few bits is decided by how that was rounded, which XLA does
    otherwise in every fusion: those are made small first.
    """

    def scalar(*args: Any) -> Any:
        total = jnp.float32(0)
        for out in jax.tree_util.tree_leaves(fn(*args)):
            if jnp.issubdtype(out.dtype, jnp.floating):
                wide = out.astype(jnp.float32)
                wide = jnp.arcsinh(wide) if out.dtype.itemsize < 4 else wide
                total = total + jnp.sum(jnp.sin(wide * 0.7))
            elif jnp.issubdtype(out.dtype, jnp.complexfloating):
                total = total + jnp.sum(jnp.sin(jnp.real(out) * 0.7) + jnp.cos(jnp.imag(out)))
        return total

    return scalar


def gradient_of(case: Case) -> Callable[..., Any]:
    """The outputs, and the gradient of `scalar_of` with respect to every float argument."""
    wrt = tuple(
        i
        for i, a in enumerate(case.arguments)
        if a.dtype != "key" and jnp.issubdtype(jnp.dtype(a.dtype), jnp.floating)
    )

    def both(*args: Any) -> Any:
        def scalar(*args: Any) -> Any:
            outs = case.fn(*args)
            return scalar_of(lambda: outs)(), outs

        (_, outs), gradient = jax.value_and_grad(scalar, wrt, has_aux=True)(*args)
        return outs, gradient

    return both


def _compare(case: Case, got: Any, want: Any, context: str) -> None:
    want = jax.tree_util.tree_leaves(want)
    assert len(got) == len(want), f"{context}: {len(got)} outputs, exact has {len(want)}"
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            b = jax.random.key_data(b)
        b = np.asarray(b)
        where = f"{context}, output {i}"
        assert a.shape == b.shape, f"{where}: shape {a.shape}, exact {b.shape}"
        assert a.dtype == b.dtype, f"{where}: dtype {a.dtype}, exact {b.dtype}"
        if jnp.issubdtype(b.dtype, jnp.inexact):
            kind = np.complex128 if jnp.issubdtype(b.dtype, jnp.complexfloating) else np.float64
            np.testing.assert_allclose(
                a.astype(kind), b.astype(kind), rtol=case.rtol, atol=case.atol, err_msg=where
            )
        else:
            np.testing.assert_array_equal(a, b, err_msg=where)


def check(
    case: Case,
    *,
    fn: Callable[..., Any] | None = None,
    rules: Mapping[Any, Any] | None = None,
    poisons: Sequence[str] = POISONS,
    poisoned: bool = True,
    paired: bool = False,
    whole: bool = False,
    room: int = 0,
) -> set[str]:
    """Run a case at its logical sizes, domains and poisons; raise on the first difference.

    Args:
        case: The case.
        fn: Run this in place of ``case.fn`` (its gradient, say), with the same arguments.
        rules: Rule table; the default one if None.
        poisons: Which poisons.
        poisoned: Whether padding is poisoned at all.
        paired: Make its programs of concrete traces even where it can be traced symbolically.
        whole: Run at every size of the case; by default its third one, the edge, is left out.
        room: How much longer arrays of a variable are than its largest size.

    Returns:
        The names of all primitives of its programs.

    Raises:
        AssertionError: Padded and exact differ.
        MaskingError: The program cannot be masked.
    """
    fn = case.fn if fn is None else fn
    masked = Masked(case, fn, rules, poisoned, paired, room)
    poisons = poisons if poisoned else ("zero",)
    every = case.logical_sizes if whole else case.logical_sizes[:2] + case.logical_sizes[3:]

    def plain(several: Sequence[Sequence[Any]]) -> list[Any]:
        return [fn(*map(jnp.asarray, args)) for args in several]

    exact = plain if case.eager else jax.jit(plain)
    seed = zlib.crc32(case.name.encode())
    for domain in case.domains:
        several = []
        for sizes in every:
            rng = np.random.default_rng([seed, *sizes.values(), DOMAINS.index(domain)])
            shapes = [tuple(evaluate_text(t, sizes) for t in a.sizes) for a in case.arguments]
            given = zip(case.arguments, shapes, strict=True)
            several.append([_contents(a, shape, sizes, domain, rng) for a, shape in given])
        for sizes, args, want in zip(every, several, exact(several), strict=True):
            if paired and not masked.serves(sizes):
                continue
            for poison in poisons:
                got = masked(args, sizes, poison)
                _compare(case, got, want, f"{case.name} at {sizes}, {domain}, {poison}")
    found = set(itertools.chain(*(primitives_of(p.jaxpr) for p in masked._programs)))
    if fn is case.fn and not paired:
        missing = set(case.covers) - found
        assert not missing, f"{case.name}: claims to cover {missing}, program has {found}"
    return found
