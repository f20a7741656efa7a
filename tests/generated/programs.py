"""Random programs, as source code.

A program is a list of lines ``v3 = jnp.cumsum(v1, axis=0)`` over arguments with open axes. Lines
are drawn from the operations below; the shape of each result is found by tracing the line with
symbolic sizes, so that the next line can be one that fits. A failure prints its source, which
is ready to become a case.

Rounding limits what may be drawn: padding changes the order of a sum, and what jumps (sort,
argmax, a comparison) would blow that up. So each value knows whether it is *rounded*; jumps
take only values that are not: arguments, integers, and what was merely moved or chosen.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import export, lax

from bucketjit._ir.expressions import is_symbolic
from tests.harness import Arg, Case

NAMES = {"jax": jax, "jnp": jnp, "lax": lax}
BUCKETS = {"b": 4, "s": 6, "t": 5}
LIMIT = 1024  # elements of a value at its bucket


@dataclass(frozen=True)
class Value:
    """A value of the program.

    Attributes:
        name: Its variable.
        shape: Symbolic.
        dtype: Its dtype.
        rounded: Whether its last digits depend on an order of summation.
    """

    name: str
    shape: tuple[Any, ...]
    dtype: Any
    rounded: bool

    @property
    def is_float(self) -> bool:
        return bool(jnp.issubdtype(self.dtype, jnp.floating))

    @property
    def is_int(self) -> bool:
        return bool(jnp.issubdtype(self.dtype, jnp.integer))


@dataclass
class Sketch:
    """A program being drawn."""

    draw: Any
    values: list[Value] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    # --- choosing operands ---

    def pick(self, wanted: Callable[[Value], bool] = lambda _: True, rank: int = 0) -> Value:
        """A value of at least this rank."""
        fits = [v for v in self.values if len(v.shape) >= rank and wanted(v)]
        if not fits:
            raise Unfit
        return self.draw(st.sampled_from(fits[::-1]))

    def axis(self, value: Value) -> int:
        return self.integer(0, len(value.shape) - 1)

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def among(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    # --- adding lines ---

    def add(self, text: str, rounded: bool) -> None:
        """Add a line, if it traces and its result is not too large."""
        name = f"v{len(self.values)}"
        try:
            out = jax.eval_shape(
                lambda *xs: eval(text, {**NAMES, **dict(zip(self._names(), xs, strict=True))}),
                *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in self.values),
            )
        except Exception as error:
            raise Unfit from error
        if len(out.shape) > 4 or size(out.shape) > LIMIT:
            raise Unfit
        self.lines.append(f"{name} = {text}")
        floats = jnp.issubdtype(out.dtype, jnp.inexact)
        self.values.append(Value(name, tuple(out.shape), out.dtype, rounded and bool(floats)))

    def add_one(self, rounded: bool, *texts: str) -> None:
        """Add one of these lines."""
        self.add(self.among(*texts), rounded)

    def _names(self) -> list[str]:
        return [v.name for v in self.values]


class Unfit(Exception):
    """This operation has no operands here."""


def size(shape: tuple[Any, ...]) -> int:
    """Elements at the bucket, about."""
    from bucketjit._ir.bounds import upper_bound_text

    lower = dict.fromkeys(BUCKETS, 1)
    return math.prod(upper_bound_text(str(d), lower, BUCKETS) for d in shape)


def _numeric(v: Value) -> bool:
    return v.is_float or v.is_int


def _float(v: Value) -> bool:
    return v.is_float


def _firm(v: Value) -> bool:
    return not v.rounded


# --- operations: each draws its operands and adds one line -------------------------------------


def unary(p: Sketch) -> None:
    x = p.pick(_float)
    n = x.name
    text, moves = p.among(
        *((f"jnp.tanh({n})", False), (f"jnp.sin({n})", False), (f"jnp.exp(-jnp.abs({n}))", False)),
        *((f"jnp.log1p(jnp.abs({n}))", False), (f"jnp.sqrt(1 + {n} * {n})", False)),
        *((f"jax.nn.sigmoid({n})", False), (f"{n} / (1 + jnp.abs({n}))", False)),
        *((f"jnp.clip({n} * 0.5, -2, 2)", False), (f"jnp.maximum({n}, 0)", True)),
        *((f"-{n}", True), (f"jnp.abs({n})", True)),
    )
    p.add(text, x.rounded or not moves)


def unary_int(p: Sketch) -> None:
    n = p.pick(lambda v: v.is_int).name
    p.add_one(
        False,
        *(f"{n} + 1", f"-{n}", f"{n} * 3", f"{n} % 5", f"{n} // 3", f"{n} ^ 5"),
        *(f"jnp.minimum({n}, 2)", f"{n}.astype(jnp.float32) % 64"),
    )


def binary(p: Sketch) -> None:
    x = p.pick(_numeric)
    y = p.pick(lambda v: v.dtype == x.dtype and broadcasts(x.shape, v.shape))
    op = p.among("{} + {}", "{} - {}", "{} * {}", "jnp.maximum({}, {})", "jnp.minimum({}, {})")
    moves = op.startswith("jnp")
    rounded = x.rounded or y.rounded or not moves
    text = op.format(x.name, y.name)
    if x.is_float and op == "{} * {}":
        text = f"jnp.clip({text}, -50, 50)"
    p.add(text, rounded)


def compare(p: Sketch) -> None:
    x = p.pick(lambda v: _numeric(v) and _firm(v))
    y = p.pick(lambda v: v.dtype == x.dtype and _firm(v) and broadcasts(x.shape, v.shape))
    p.add(p.among("{} > {}", "{} == {}", "{} <= {}").format(x.name, y.name), False)


def choose(p: Sketch) -> None:
    mask = p.pick(lambda v: v.dtype == jnp.bool_)
    x = p.pick(lambda v: _numeric(v) and broadcasts(mask.shape, v.shape))
    p.add(f"jnp.where({mask.name}, {x.name}, 0)", x.rounded)


def reduction(p: Sketch) -> None:
    x = p.pick(_numeric, 1)
    axis = p.among(None, *range(len(x.shape)))
    keep = p.among("", ", keepdims=True")
    name = p.among("sum", "mean", "max", "min", "var", "std", "prod", "ptp", "norm", "logsumexp")
    n = x.name
    moves = name in ("max", "min")
    if name in ("mean", "var", "std", "norm", "logsumexp") and not x.is_float:
        raise Unfit
    if name == "prod" and x.is_float:
        n = f"jnp.tanh({n})"
    call = {
        "std": f"jnp.sqrt(1 + jnp.var({n}, axis={axis}{keep}))",
        "norm": f"jnp.sqrt(1 + jnp.sum({n} * {n}, axis={axis}{keep}))",
        "logsumexp": f"jax.nn.logsumexp({n}, axis={axis}{keep})",
    }.get(name, f"jnp.{name}({n}, axis={axis}{keep})")
    p.add(call, x.rounded or (x.is_float and not moves))


def reduce_flags(p: Sketch) -> None:
    x = p.pick(lambda v: v.dtype == jnp.bool_, 1)
    axis = p.among(None, *range(len(x.shape)))
    name = p.among("any", "all", "count_nonzero")
    p.add(f"jnp.{name}({x.name}, axis={axis})", False)


def arg_reduction(p: Sketch) -> None:
    x = p.pick(lambda v: _numeric(v) and _firm(v), 1)
    axis = p.among(None, *range(len(x.shape)))
    name = p.among("argmax", "argmin")
    p.add(f"jnp.{name}({x.name}, axis={axis})", False)


def cumulative(p: Sketch) -> None:
    x = p.pick(_numeric, 1)
    axis = p.axis(x)
    reverse = p.among("", ", reverse=True")
    name = p.among("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
    if name == "cumlogsumexp" and not x.is_float:
        raise Unfit
    n = f"jnp.tanh({x.name})" if name == "cumprod" and x.is_float else x.name
    moves = name in ("cummax", "cummin")
    p.add(f"lax.{name}({n}, axis={axis}{reverse})", x.rounded or (x.is_float and not moves))


def normalise(p: Sketch) -> None:
    x = p.pick(_float, 1)
    axis = p.axis(x)
    n = x.name
    p.add_one(
        True,
        f"jax.nn.softmax({n}, axis={axis})",
        f"jax.nn.log_softmax({n}, axis={axis})",
        f"({n} - {n}.mean({axis}, keepdims=True)) / jnp.sqrt(1 + {n}.var({axis}, keepdims=True))",
    )


def order(p: Sketch) -> None:
    x = p.pick(lambda v: _numeric(v) and _firm(v), 1)
    axis = p.axis(x)
    n, last = x.name, len(x.shape) - 1
    k = p.integer(1, 2)
    p.add_one(
        False,
        f"jnp.sort({n}, axis={axis})",
        f"jnp.sort({n}, axis={axis}, descending=True)",
        f"jnp.argsort({n}, axis={axis})",
        f"jnp.argsort({n}, axis={axis}, descending=True)",
        f"jnp.take_along_axis({n}, jnp.argsort({n}, axis={axis}), axis={axis})",
        f"lax.top_k({n}, {k})[{k - 1}]",
        f"jnp.median({n}, axis={axis})",
        f"jnp.searchsorted(jnp.sort({n}.reshape(-1)), {n})",
        f"jnp.take_along_axis({n}, jnp.argmax({n}, {last}, keepdims=True), {last})",
    )


def sort_rounded(p: Sketch) -> None:
    x = p.pick(_float, 1)
    p.add(f"jnp.sort({x.name}, axis={p.axis(x)})", True)


def contraction(p: Sketch) -> None:
    x = p.pick(_numeric, 1)
    i = p.axis(x)
    y = p.pick(lambda v: v.dtype == x.dtype and any(d == x.shape[i] for d in v.shape), 1)
    j = p.among(*(j for j, d in enumerate(y.shape) if d == x.shape[i]))
    left, right = (f"jnp.tanh({v.name})" if v.is_float else v.name for v in (x, y))
    batch = [
        (a, c)
        for a, d in enumerate(x.shape)
        for c, e in enumerate(y.shape)
        if d == e and a != i and c != j
    ]
    if batch and p.among(True, False):
        a, c = p.among(*batch)
        numbers = f"((({i},), ({j},)), (({a},), ({c},)))"
        p.add(f"lax.dot_general({left}, {right}, {numbers})", x.is_float)
    else:
        p.add(f"jnp.tensordot({left}, {right}, (({i},), ({j},)))", x.is_float)


def rearrange(p: Sketch) -> None:
    x = p.pick(rank=1)
    n, rank = x.name, len(x.shape)
    axis = p.axis(x)
    order = p.draw(st.permutations(range(rank)))
    choices = [
        f"jnp.transpose({n}, {tuple(order)})",
        f"jnp.expand_dims({n}, {p.integer(0, rank)})",
        f"jnp.flip({n}, {axis})",
        f"jnp.flip({n})",
        f"jnp.roll({n}, {p.integer(-3, 3)}, {axis})",
        f"jnp.repeat({n}, 2, {axis})",
        f"jnp.tile({n}, 2)",
        f"jnp.stack([{n}, {n}], {p.integer(0, rank)})",
    ]
    if rank >= 2:
        choices += [f"jnp.tril({n})", f"jnp.triu({n}, {p.integer(-1, 1)})", f"jnp.diagonal({n})"]
    if x.is_float or x.is_int:
        choices += [f"jnp.diff({n}, axis={axis})"]
    p.add_one(x.rounded, *choices)


def join(p: Sketch) -> None:
    x = p.pick(rank=1)
    axis = p.axis(x)

    def fits(v: Value) -> bool:
        return (
            v.dtype == x.dtype
            and len(v.shape) == len(x.shape)
            and all(i == axis or d == x.shape[i] for i, d in enumerate(v.shape))
        )

    y, z = p.pick(fits), p.pick(fits)
    names = p.among([x, y], [x, y, z])
    text = ", ".join(v.name for v in names)
    p.add(f"jnp.concatenate([{text}], {axis})", any(v.rounded for v in names))


def pad(p: Sketch) -> None:
    x = p.pick(_numeric, 1)
    n, rank, axis = x.name, len(x.shape), p.axis(x)
    low, high, inner = p.integer(-1, 2), p.integer(-1, 2), p.integer(0, 1)
    config = tuple((low, high, inner) if i == axis else (0, 0, 0) for i in range(rank))
    mode = p.among("constant", "edge", "wrap", "reflect")
    widths = tuple((max(low, 0), max(high, 0)) if i == axis else (0, 0) for i in range(rank))
    zero = f"jnp.zeros((), {n}.dtype)"
    texts = f"lax.pad({n}, {zero}, {config})", f"jnp.pad({n}, {widths}, mode='{mode}')"
    p.add_one(x.rounded, *texts)


def cut(p: Sketch) -> None:
    x = p.pick(rank=1)
    axis = p.axis(x)
    piece = p.among(
        *("1:", ":-1", "::2", "::-1", "-1", "0", "-2:", "1::2", ":2", "::-2", "-1:0:-1"),
        *("None", "1:-1"),
    )
    p.add(f"{x.name}[{':, ' * axis}{piece}]", x.rounded)


def reshape(p: Sketch) -> None:
    x = p.pick(rank=1)
    n, rank = x.name, len(x.shape)
    choices = [f"{n}.reshape(-1)"]
    for i in range(rank - 1):
        before, after = f"{n}.shape[:{i}]", f"{n}.shape[{i + 2}:]"
        choices.append(f"{n}.reshape(*{before}, {n}.shape[{i}] * {n}.shape[{i + 1}], *{after})")
    for other in p.values:
        if other.shape != x.shape and math.prod(other.shape) == math.prod(x.shape):
            choices.append(f"{n}.reshape({other.name}.shape)")
    for i, d in enumerate(x.shape):
        if not is_symbolic(d) and d % 2 == 0:
            choices.append(f"{n}.reshape(*{n}.shape[:{i}], 2, {d // 2}, *{n}.shape[{i + 1}:])")
    p.add_one(x.rounded, *choices)


def _index(v: Value) -> bool:
    return v.dtype == jnp.int32 and len(v.shape) <= 2


def gather(p: Sketch) -> None:
    x = p.pick(rank=1)
    index = p.pick(_index)
    n, i, axis = x.name, index.name, p.axis(x)
    mode = p.among("clip", "fill", "wrap")
    choices = [
        f"{n}[{i}]",
        f"{n}[{i} % {n}.shape[0]]",
        f"{n}[{n}.shape[0] // 2]",
        f"{n}[jnp.arange({n}.shape[0])[::-1]]",
        f"{n}[({i} * 0 + {n}.shape[0]) - 1]",
        f"jnp.nan_to_num(jnp.take({n}, {i}, axis={axis}, mode='{mode}'))",
    ]
    if not index.shape:
        choices += [
            f"lax.dynamic_slice_in_dim({n}, {i}, 1, {axis})",
            f"lax.dynamic_index_in_dim({n}, {i}, {axis}, False)",
            f"lax.dynamic_slice_in_dim({n}, {i}, {n}.shape[{axis}] - 1, {axis})",
        ]
    p.add_one(x.rounded, *choices)


def scatter(p: Sketch) -> None:
    x = p.pick(_numeric, 1)
    n = x.name
    index = p.pick(_index)
    i = index.name
    mode = p.among("", ", mode='drop'", ", mode='clip'", ", mode='wrap'")
    how = p.among("add(1", "max(2", "min(1", "set(3", "mul(2")
    choices = [
        f"{n}.at[{i}].{how}{mode})",
        f"{n}.at[-1].{how})",
        f"{n}.at[::2].{how})",
        f"{n}.at[{n}.shape[0] // 2].{how})",
        f"jnp.zeros({i}.shape, jnp.int32).at[{i}].add({i}{mode})",
        f"jnp.bincount({i}.reshape(-1), length={p.integer(1, 4)})",
        f"jnp.bincount({i}.reshape(-1) % 7, length={n}.shape[0])",
    ]
    rows = [v for v in p.values if _index(v) and len(v.shape) == 1 and v.shape == x.shape[:1]]
    if rows:
        ids = p.among(*rows).name
        choices += [
            f"jax.ops.segment_sum({n}, {ids}, 3)",
            f"jax.ops.segment_sum({n}, {ids} % {n}.shape[0], {n}.shape[0])",
            f"jax.ops.segment_max({n}, {ids} % 2, 2)",
        ]
    if not index.shape:
        choices += [f"lax.dynamic_update_slice_in_dim({n}, {n}[:1] * 2, {i}, 0)"]
    text = p.among(*choices)
    p.add(text, x.rounded or (x.is_float and ("sum" in text or "add" in text)))


def sizes(p: Sketch) -> None:
    x = p.pick(rank=1)
    n, axis = x.name, p.axis(x)
    choices = [
        f"jnp.arange({n}.shape[{axis}])",
        f"jnp.ones({n}.shape, jnp.float32)",
        f"jnp.eye({n}.shape[{axis}])",
        f"jnp.int32({n}.shape[{axis}])",
        f"jnp.full({n}.shape, {n}.shape[{axis}])",
        f"lax.broadcasted_iota(jnp.int32, {n}.shape, {axis})",
    ]
    if x.dtype == jnp.int32 and len(x.shape) < 3:
        choices += [f"jax.nn.one_hot({n}, {n}.shape[{axis}])", f"jax.nn.one_hot({n}, 3)"]
    other = p.pick()
    if len(x.shape) < 3:
        choices += [f"jnp.broadcast_to({n}, {other.name}.shape + {n}.shape)"]
    p.add_one(x.rounded, *choices)


def guard(p: Sketch) -> None:
    x = p.pick(_numeric, 1)
    n, axis = x.name, p.axis(x)
    p.add_one(
        x.rounded,
        f"{n} + 1 if {n}.shape[{axis}] > 2 else {n} * 2",
        f"{n} + 1 if {n}.shape[{axis}] == 3 else {n} * 2",
        f"{n}[: min({n}.shape[0], 3)]",
    )


def scan(p: Sketch) -> None:
    x = p.pick(_float, 1)
    n = x.name
    reverse = p.among("", ", reverse=True")
    step = "lambda c, r: (jnp.tanh(c + r), c)"
    total = "lambda c, r: (jnp.tanh(c + r.sum()), r * c)"
    p.add_one(
        True,
        f"lax.scan({step}, {n}[0], {n}{reverse})[1]",
        f"lax.scan({step}, {n}[0], {n}{reverse})[0]",
        f"lax.scan({total}, jnp.float32(0), {n}{reverse})[1]",
        f"lax.scan({total}, jnp.float32(0), {n}{reverse})[0]",
        f"lax.map(lambda r: r - r.mean(), {n})",
        f"lax.associative_scan(jnp.maximum, {n}{reverse})",
    )


def loop(p: Sketch) -> None:
    x = p.pick(_float, 1)
    n = x.name
    body = f"lambda i, c: jnp.tanh(c + {n}[i])"
    p.add_one(
        True,
        f"lax.fori_loop(0, {n}.shape[0], {body}, {n}[0])",
        f"lax.while_loop(lambda c: c[0] < {n}.shape[0],"
        f" lambda c: (c[0] + 1, jnp.tanh(c[1] * 2)), (0, {n}))[1]",
        f"lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c + c.sum()), {n})",
    )


def branch(p: Sketch) -> None:
    x = p.pick(_numeric)
    index = p.pick(lambda v: v.is_int and _firm(v))
    n = x.name
    p.add_one(
        True,
        f"lax.cond({index.name}.sum() > 0, lambda y: y + y, lambda y: -y, {n})",
        f"lax.switch({index.name}.sum() % 3,"
        f" [lambda y: y, lambda y: -y, lambda y: y + y.sum()], {n})",
    )


def mapped(p: Sketch) -> None:
    x = p.pick(_float, 2)
    n = x.name
    p.add_one(
        True,
        f"jax.vmap(lambda r: jnp.tanh(r - r.mean()))({n})",
        f"jax.vmap(lambda r: lax.while_loop(lambda c: c.sum() > 1,"
        f" lambda c: c * 0.5 - 0.1, jnp.tanh(r)), in_axes=1)({n} * 0)",
        f"jax.grad(lambda y: jnp.sum(jnp.tanh(y) * jnp.cumsum(y, 0) * 0.1))({n})",
        f"jax.grad(lambda y: jax.nn.logsumexp(y, axis=-1).sum())({n})",
        f"jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)))({n})",
        f"jax.jit(lambda y: y - y.max(0))({n})",
    )


def random(p: Sketch) -> None:
    x = p.pick(_numeric, 1)
    n = x.name
    key = f"jax.random.key({p.integer(0, 3)})"
    p.add_one(
        x.rounded,
        f"jax.random.normal({key}, {n}.shape)",
        f"jax.random.uniform({key}, {n}.shape)",
        f"jnp.where(jax.random.bernoulli({key}, 0.5, {n}.shape), {n}, 0)",
        f"jax.random.randint({key}, {n}.shape, 0, 5)",
    )


def windows(p: Sketch) -> None:
    x = p.pick(_float, 2)
    n, rank, axis = x.name, len(x.shape), p.axis(x)
    size = tuple(p.integer(1, 3) if i == axis else 1 for i in range(rank))
    stride = tuple(p.integer(1, 2) if i == axis else 1 for i in range(rank))
    padding = p.among("SAME", "VALID")
    init, op, moves = p.among(("-jnp.inf", "lax.max", True), ("0.0", "lax.add", False))
    text = f"lax.reduce_window({n}, {init}, {op}, {size}, {stride}, '{padding}')"
    p.add(text, x.rounded or not moves)


def convolution(p: Sketch) -> None:
    x = p.pick(lambda v: v.is_float and len(v.shape) == 3)
    n, k = x.name, p.integer(1, 3)
    stride, padding = p.integer(1, 2), p.among("SAME", "VALID")
    kernel = f"jnp.ones(({n}.shape[1], {n}.shape[1], {k})) * 0.1"
    p.add(
        f"lax.conv_general_dilated(jnp.tanh({n}), {kernel}, ({stride},), '{padding}',"
        " dimension_numbers=('NCH', 'OIH', 'NCH'))",
        True,
    )


OPERATIONS = (
    *(unary, unary_int, binary, compare, choose, reduction, reduce_flags, arg_reduction),
    *(cumulative, normalise, order, sort_rounded, contraction, rearrange, join, pad, cut, reshape),
    *(gather, scatter, sizes, guard, scan, loop, branch, mapped, random, windows, convolution),
)


def broadcasts(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether two symbolic shapes broadcast."""
    pairs = zip(a[::-1], b[::-1], strict=False)
    return all(d == e or (d == 1) is True or (e == 1) is True for d, e in pairs)


# --- whole programs --------------------------------------------------------------------------


@dataclass(frozen=True)
class Generated:
    """A program and the sizes to run it at.

    Attributes:
        args: Its arguments.
        lines: Its lines; each defines the next variable.
        constraints: What holds of its sizes.
        sizes: Logical sizes.
    """

    args: tuple[Arg, ...]
    lines: tuple[str, ...]
    constraints: tuple[str, ...]
    sizes: tuple[dict[str, int], ...]

    @property
    def source(self) -> str:
        """The program as a function."""
        names = [f"v{i}" for i in range(len(self.args))]
        results = [f"v{i + len(names)}" for i in range(len(self.lines))]
        body = "\n".join(f"    {line}" for line in self.lines)
        return f"def program({', '.join(names)}):\n{body}\n    return {', '.join(results)},\n"

    def function(self) -> Callable[..., Any]:
        """The program, compiled."""
        space: dict[str, Any] = dict(NAMES)
        exec(self.source, space)
        return space["program"]

    def case(self, name: str = "generated") -> Case:
        """The program as a case of the harness."""
        return Case(
            name,
            self.function(),
            self.args,
            buckets=BUCKETS,
            sizes=self.sizes,
            domains=("mixed",),
            rtol=2e-4,
            atol=2e-4,
            constraints=self.constraints,
        )

    def __repr__(self) -> str:
        return (
            f"{self.source}\nargs={self.args}\nconstraints={self.constraints}\nsizes={self.sizes}"
        )


@st.composite
def programs(draw: Any) -> Generated:
    """A program of 3 to 12 operations over 1 to 3 open axes."""
    variables = draw(st.sampled_from([("b",), ("s",), ("b", "s"), ("b", "s"), ("b", "s", "t")]))
    low = {v: draw(st.sampled_from([1, 1, 2, 3])) for v in variables}
    constraints = tuple(f"{v} >= {n}" for v, n in low.items() if n > 1)
    args = []
    for i in range(draw(st.integers(1, 3))):
        dims = draw(st.lists(st.sampled_from([*variables, *variables, "2", "3"]), max_size=3))
        if i == 0:
            dims = [*variables, *dims][:3]
        dtype = draw(st.sampled_from(["float32", "float32", "float32", "int32"]))
        args.append(Arg(", ".join(dims), dtype))
    scope = export.SymbolicScope(constraints)
    sketch = Sketch(draw)
    for i, arg in enumerate(args):
        shape = export.symbolic_shape(arg.shape, scope=scope) if arg.sizes else ()
        sketch.values.append(Value(f"v{i}", tuple(shape), jnp.dtype(arg.dtype), False))
    wanted = draw(st.integers(3, 12))
    for _ in range(4 * wanted):
        operation = draw(st.sampled_from(OPERATIONS))
        with contextlib.suppress(Unfit):
            operation(sketch)
        if len(sketch.lines) == wanted:
            break
    edges = {v: st.integers(low[v], BUCKETS[v]) for v in variables}
    rows = draw(st.lists(st.fixed_dictionaries(edges), min_size=1, max_size=2, unique_by=str))
    return Generated(tuple(args), tuple(sketch.lines), constraints, tuple(rows))
