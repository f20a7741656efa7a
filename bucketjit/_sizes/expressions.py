"""Dimension variables: evaluate, bound and solve the symbolic sizes of a traced program.

A *dimension* is an ``int`` or a symbolic expression of ``jax.export`` (``2*b + 1``). An
expression is compiled once from its text and then costs about 0.1 us a read (JAX's own
evaluation takes 14 us).
"""

from __future__ import annotations

import ast
import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from bucketjit import _jax
from bucketjit._errors import MaskingError

Dim = Any  # int, or a symbolic dimension of jax.export
Shape = tuple[Dim, ...]


def is_symbolic(dim: Any) -> bool:
    """True for a symbolic size, False for an int."""
    return type(dim) is not int and export.is_symbolic_dim(dim)


def symbolic_axes(shape: Iterable[Dim]) -> tuple[int, ...]:
    """The axes of ``shape`` whose size is symbolic."""
    return tuple(i for i, d in enumerate(shape) if is_symbolic(d))


def _floordiv(a: Any, b: Any) -> Any:
    return a // b


def _mod(a: Any, b: Any) -> Any:
    return a % b


_FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "int": {"floordiv": _floordiv, "mod": _mod, "max": max, "min": min},
    "array": {"floordiv": _floordiv, "mod": _mod, "max": np.maximum, "min": np.minimum},
    "traced": {"floordiv": _floordiv, "mod": _mod, "max": jnp.maximum, "min": jnp.minimum},
}


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    return ast.parse(text.replace("^", "**"), mode="eval").body


@functools.lru_cache(maxsize=4096)
def variables_of(text: str) -> tuple[str, ...]:
    """Names of the dimension variables in the text of an expression, sorted."""
    nodes = list(ast.walk(_parse(text)))
    names = {n.id for n in nodes if isinstance(n, ast.Name)}
    return tuple(sorted(names - _FUNCTIONS["int"].keys()))


@functools.lru_cache(maxsize=4096)
def _compiled(text: str, kind: str) -> Callable[..., Any]:
    return _function(text, _parse(text), kind)


def _function(text: str, node: ast.expr, kind: str) -> Callable[..., Any]:
    code = f"lambda {', '.join(variables_of(text))}: {ast.unparse(node)}"
    return eval(compile(code, f"<dimension {text}>", "eval"), dict(_FUNCTIONS[kind]))  # noqa: S307


def dim_operands(text: str) -> tuple[str, str]:
    """The two operands of ``min(a, b)``, ``max(a, b)`` and the like.

    >>> dim_operands("min(64, s - 1)")
    ('64', 's - 1')

    Raises:
        SyntaxError: The text is not an expression.
        ValueError: It is not a call with two operands.
    """
    node = _parse(text)
    if not isinstance(node, ast.Call) or len(node.args) != 2:
        raise ValueError(f"{text!r} is not a function of two sizes")
    return ast.unparse(node.args[0]), ast.unparse(node.args[1])


def evaluate(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The value of ``dim`` at these sizes, all Python ints.

    >>> evaluate(7, {})
    7
    """
    return dim if isinstance(dim, int) else evaluate_text(str(dim), sizes)


def evaluate_text(text: str, sizes: Mapping[str, int]) -> int:
    """The value of an expression given as text.

    >>> evaluate_text("2*b^2 - floordiv(s, 2)", {"b": 3, "s": 5})
    16
    """
    return _compiled(text, "int")(*(sizes[v] for v in variables_of(text)))


def evaluate_at(dim: Dim, sizes: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    """The values of ``dim`` at many sizes at once.

    >>> evaluate_at(7, {})
    7
    """
    if isinstance(dim, int):
        return dim
    return _compiled(str(dim), "array")(*(sizes[v] for v in variables_of(str(dim))))


def shape_function(shape: Shape, variables: Sequence[str]) -> Callable[..., tuple[int, ...]]:
    """A function of the variables, in order, that gives the whole shape: one call per array."""
    parts = [str(d).replace("^", "**") for d in shape]
    code = f"lambda {', '.join(variables)}: ({''.join(p + ', ' for p in parts)})"
    return eval(compile(code, f"<shape {shape}>", "eval"), dict(_FUNCTIONS["int"]))  # noqa: S307


def _never_decreases(node: ast.expr) -> bool:
    """True if the expression is >= 0 and grows with every variable (all of them >= 0)."""
    match node:
        case ast.Constant(value=int() as value):
            return value >= 0
        case ast.Name():
            return True
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult(), right=right):
            return _never_decreases(left) and _never_decreases(right)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant()):
            return _never_decreases(left)
        case ast.Call(func=ast.Name(id="floordiv"), args=[left, ast.Constant(value=int() as k)]):
            return k > 0 and _never_decreases(left)
        case ast.Call(func=ast.Name(id="max" | "min"), args=args):
            return all(map(_never_decreases, args))
    return False


def _grows(node: ast.expr) -> bool:
    """Like `_never_decreases`, but constants may also be taken away (``b - 1``)."""
    match node:
        case ast.BinOp(left=left, op=ast.Sub(), right=ast.Constant()):
            return _grows(left)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _grows(left) and _grows(right)
        case ast.Call(func=ast.Name(id="floordiv"), args=[left, ast.Constant(value=int() as k)]):
            return k > 0 and _grows(left)
        case ast.Call(func=ast.Name(id="max" | "min"), args=args):
            return all(map(_grows, args))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant()) | ast.Constant():
            return True
    return _never_decreases(node)


_LATTICE_LIMIT = 1 << 20

Range = tuple[int, int]


def _interval(node: ast.expr, lo: Mapping[str, int], hi: Mapping[str, int]) -> Range:
    """Bounds of an expression by interval arithmetic: always sound, not always tight."""

    def corners(
        op: Callable[[int, int], int], a: tuple[int, int], b: tuple[int, int]
    ) -> tuple[int, int]:
        values = [op(x, y) for x in a for y in b]
        return min(values), max(values)

    match node:
        case ast.Constant(value=int() as value):
            return value, value
        case ast.Name(id=name):
            return lo[name], hi[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            a, b = _interval(operand, lo, hi)
            return -b, -a
        case ast.BinOp(left=left, op=op, right=right):
            x, y = _interval(left, lo, hi), _interval(right, lo, hi)
            if isinstance(op, ast.Add):
                return x[0] + y[0], x[1] + y[1]
            if isinstance(op, ast.Sub):
                return x[0] - y[1], x[1] - y[0]
            if isinstance(op, ast.Mult):
                return corners(lambda a, b: a * b, x, y)
            if isinstance(op, ast.Pow):
                low, high = corners(lambda a, b: a**b, x, y)
                return (min(low, 0) if x[0] < 0 else low), high
        case ast.Call(func=ast.Name(id=name), args=[left, right]):
            x, y = _interval(left, lo, hi), _interval(right, lo, hi)
            if name == "max":
                return max(x[0], y[0]), max(x[1], y[1])
            if name == "min":
                return min(x[0], y[0]), min(x[1], y[1])
            if name == "floordiv":
                largest = max(map(abs, x))
                return corners(lambda a, b: a // b, x, y) if y[0] > 0 else (-largest, largest)
            if name == "mod":
                most = max(0, y[1] - 1)
                return min(0, y[0] + 1), min(most, x[1]) if x[0] >= 0 < y[0] else most
    raise ValueError(f"cannot bound {ast.unparse(node)}")


def upper_bound(dim: Dim, lo: Mapping[str, int], hi: Mapping[str, int]) -> int:
    """The largest value of ``dim`` while every variable ``v`` is in ``lo[v]..hi[v]``.

    Exact where the expression grows with its variables or the box has at most 2**20 points;
    otherwise an upper bound from interval arithmetic.

    Args:
        dim: An int or a symbolic dimension.
        lo: Smallest size of each variable.
        hi: Largest size of each variable: its bucket.

    Returns:
        The padded size of ``dim`` in this bucket, at least 0.

    Raises:
        ValueError: The expression cannot be bounded.
    """
    return dim if isinstance(dim, int) else upper_bound_text(str(dim), lo, hi)


def upper_bound_text(text: str, lo: Mapping[str, int], hi: Mapping[str, int]) -> int:
    """`upper_bound` of an expression given as text."""
    return _upper_bound(text, tuple((v, lo[v], hi[v]) for v in variables_of(text)))


@functools.lru_cache(maxsize=16384)
def _upper_bound(text: str, box: tuple[tuple[str, int, int], ...]) -> int:
    node = _parse(text)
    hi = {v: h for v, _, h in box}
    if _grows(node):
        return max(0, evaluate_text(text, hi))
    if math.prod(h - low + 1 for _, low, h in box) <= _LATTICE_LIMIT:
        widest = max(map(abs, _reach(node, hi)))
        exact = np.int64 if widest <= _MOST_OF_INT64 else object
        axes = [np.arange(low, h + 1, dtype=exact) for _, low, h in box]
        grid = np.meshgrid(*axes, indexing="ij", sparse=True)
        with np.errstate(divide="ignore"):
            return max(0, int(np.max(_compiled(text, "array")(*grid))))
    return max(0, _interval(node, {v: low for v, low, _ in box}, hi)[1])


@functools.lru_cache(maxsize=16384)
def _lower_bound(text: str, box: tuple[tuple[str, int, int], ...]) -> int:
    """The smallest value; 0 where it is not negative. Interval arithmetic does, within int32."""
    node = _parse(text)
    if _never_decreases(node):
        return 0
    least = _interval(node, {v: low for v, low, _ in box}, {v: h for v, _, h in box})[0]
    return least if least >= -_MOST else -_upper_bound(f"-({text})", box)


def solve(text: str, value: int, known: Mapping[str, int]) -> dict[str, int]:
    """Find the one unknown variable of an expression that is linear in it.

    >>> solve("2*b + 1", 7, {})
    {'b': 3}

    Args:
        text: The expression, such as ``"2*b + 1"``.
        value: The size it was given.
        known: Variables whose size is known already.

    Returns:
        The unknown variable and its size; empty if there is none, or more than one, or the
        expression is not linear in it, or no whole size (0 or more) solves it.
    """
    unknown = [v for v in variables_of(text) if v not in known]
    if len(unknown) != 1:
        return {}
    at = [evaluate_text(text, {**known, unknown[0]: n}) for n in (0, 1, 2)]
    slope = at[1] - at[0]
    if slope == 0 or at[2] - at[1] != slope or (value - at[0]) % slope:
        return {}
    size = (value - at[0]) // slope
    return {unknown[0]: size} if size >= 0 else {}


@functools.lru_cache(maxsize=4096)
def is_multiple(text: str, variable: str) -> bool:
    """Whether a size is the variable times something that does not depend on it.

    >>> [is_multiple(text, "b") for text in ("b", "2*b*s + b", "b + 1", "b^2", "floordiv(b, 2)")]
    [True, True, False, False, False]
    """
    return all(
        sum(isinstance(f, ast.Name) and f.id == variable for f in _factors(term)) == 1
        and sum(variable in variables_of(ast.unparse(f)) for f in _factors(term)) == 1
        for term in _terms(_parse(text))
    )


def _terms(node: ast.expr) -> list[ast.expr]:
    match node:
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return [*_terms(left), *_terms(right)]
        case ast.UnaryOp(operand=operand):
            return _terms(operand)
    return [node]


def _factors(node: ast.expr) -> list[ast.expr]:
    match node:
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return [*_factors(left), *_factors(right)]
        case ast.UnaryOp(operand=operand):
            return _factors(operand)
    return [node]


# --- the value at run time ------------------------------------------------------------------
#
# Sizes are int32 at run time, but what is computed on the way to one may be larger: that of
# ``n * 750_000 // 1_000_000`` is, from n = 2864 on.

_MOST, _MOST_OF_INT64 = 2**31 - 1, 2**63 - 1


def evaluate_traced(dim: Dim, sizes: Mapping[str, jax.Array], bucket: Mapping[str, int]) -> Any:
    """The value of ``dim`` where the sizes are run-time int32 scalars, at most those of a bucket.

    Raises:
        MaskingError: It takes integers of more than 64 bits.
    """
    if isinstance(dim, int):
        return dim
    text = str(dim)
    names = variables_of(text)
    function, is_wide = _traced(text, tuple((v, bucket[v]) for v in names))
    values = [sizes[v] for v in names]
    if not is_wide:
        return function(*values)
    with jax.enable_x64(True):
        wide = function(*(lax.convert_element_type(n, np.int64) for n in values))
        return lax.convert_element_type(wide, np.int32)


@functools.lru_cache(maxsize=16384)
def _traced(text: str, box: tuple[tuple[str, int], ...]) -> tuple[Callable[..., Any], bool]:
    """The function of run-time sizes, and whether to give it int64."""
    node = _Decided(dict(box)).visit(copy.deepcopy(_parse(text)))
    least, most = _reach(node, dict(box))
    if max(-least, most) > _MOST_OF_INT64:
        raise MaskingError(
            f"computing the size {text} takes integers of more than 64 bits in this bucket",
            "choose smaller buckets, or compute on the size with jax.numpy",
            in_bucket=True,
        )
    return _function(text, node, "traced"), max(-least, most) > _MOST


def _not_int32(dim: Dim) -> MaskingError:
    return MaskingError(
        f"the size {dim} does not fit into int32 in this bucket",
        "choose smaller buckets",
        in_bucket=True,
    )


class _Decided(ast.NodeTransformer):
    """Leaves out what no size decides: ``min(n, 9223372036854775807)`` is ``n``.

    Python's way to take all of an axis is ``x[: sys.maxsize]``.
    """

    def __init__(self, hi: Mapping[str, int]) -> None:
        self._lo, self._hi = dict.fromkeys(hi, 0), hi

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        assert isinstance(node.func, ast.Name)
        left, right = node.args
        (a, b), (c, d) = (_interval(x, self._lo, self._hi) for x in node.args)
        match node.func.id:
            case "min" if b <= c:
                return left
            case "min" if d <= a:
                return right
            case "max" if a >= d:
                return left
            case "max" if c >= b:
                return right
            case "mod" if a >= 0 and b < c:
                return left
            case "floordiv" if a >= 0 and b < c:
                return ast.Constant(0)
        return node


def _reach(node: ast.expr, hi: Mapping[str, int]) -> Range:
    """Bounds of an expression and of all that is computed on the way, at sizes from 0 on."""
    lo = dict.fromkeys(hi, 0)
    bounds = [
        _interval(part, lo, hi)
        for part in ast.walk(node)
        if isinstance(part, ast.expr) and getattr(part, "id", None) not in _FUNCTIONS["int"]
    ]
    return min(low for low, _ in bounds), max(high for _, high in bounds)


class BucketSizes:
    """The sizes one executable is built for: padded sizes as ints, logical ones at run time.

    Attributes:
        bucket: Padded size of each variable.
        values: Run-time logical size of each variable, int32 scalars.
        leaks: Constants that depend on the logical sizes, at padded sizes.

    Raises:
        MaskingError: A padded size is no int32, which sizes are at run time.
    """

    def __init__(
        self,
        bucket: Mapping[str, int],
        lower: Mapping[str, int],
        values: Mapping[str, Any],
        leaks: Sequence[Any] = (),
    ) -> None:
        self.leaks = tuple(leaks)
        self.bucket = dict(bucket)
        for variable, size in bucket.items():
            if size > _MOST:
                raise _not_int32(variable)
        self.values = dict(values)
        self._lower = {v: lower.get(v, 1) for v in bucket}
        # By identity: hashing an expression formats it. What is looked up is kept alive.
        self._padded: dict[int, tuple[Dim, int]] = {}
        self._texts: dict[int, tuple[Dim, str]] = {}
        self._made: dict[Any, Any] = {}

    def extended(self, more: Mapping[str, tuple[int, Any]]) -> BucketSizes:
        """These sizes and more: padded and run-time logical size by variable."""
        return BucketSizes(
            {**self.bucket, **{v: padded for v, (padded, _) in more.items()}},
            {**self._lower, **dict.fromkeys(more, 0)},
            {**self.values, **{v: logical for v, (_, logical) in more.items()}},
            self.leaks,
        )

    def padded(self, dim: Dim) -> int:
        """The padded size of a dimension: an upper bound of it over the whole bucket.

        Raises:
            MaskingError: Sizes and positions of that size are not int32, which they are at run
                time.
        """
        if isinstance(dim, int):
            return dim
        known = self._padded.get(id(dim))
        if known is None:
            size = upper_bound(dim, self._lower, self.bucket)
            if size > _MOST:
                raise _not_int32(dim)
            known = self._padded[id(dim)] = (dim, size)
        return known[1]

    def _text(self, dim: Dim) -> str:
        known = self._texts.get(id(dim))
        if known is None:
            known = self._texts[id(dim)] = (dim, str(dim))
        return known[1]

    def padded_shape(self, shape: Iterable[Dim]) -> tuple[int, ...]:
        """The padded sizes of a shape."""
        return tuple(map(self.padded, shape))

    def logical(self, dim: Dim) -> Any:
        """The logical size of a dimension: an int, or an int32 scalar known at run time.

        Raises:
            MaskingError: It does not fit, or takes integers of more than 64 bits.
        """
        if isinstance(dim, int):
            return dim
        self.padded(dim)
        text = self._text(dim)
        box = tuple((v, self._lower[v], self.bucket[v]) for v in variables_of(text))
        if _lower_bound(text, box) < -_MOST:
            raise _not_int32(dim)
        return jnp.asarray(evaluate_traced(dim, self.values, self.bucket), jnp.int32)

    def in_bounds(
        self,
        shape: Shape,
        axes: Iterable[int] | None = None,
        broadcast_to: tuple[int, ...] | None = None,
    ) -> Any | None:
        """Where an array of this logical shape is real.

        Masks are made once per trace and shape: most equations of a program share theirs.

        Args:
            shape: A logical (symbolic) shape.
            axes: Only these axes; all of them by default.
            broadcast_to: Shape of the mask; by default it has size 1 along axes that play no
                part, so that it broadcasts against the padded shape.

        Returns:
            A boolean array, or None if all of these axes are static.
        """
        rank = len(shape)
        every = range(rank) if axes is None else sorted({a % rank for a in axes})
        parts = tuple((a, self._text(shape[a])) for a in every if is_symbolic(shape[a]))
        if not parts:
            return None
        key = (_jax.current_trace(), rank, parts, broadcast_to)
        mask = self._made.get(key)
        if mask is None:
            mask = self._make_mask(shape, [a for a, _ in parts])
            if broadcast_to is not None:
                mask = lax.broadcast_in_dim(mask, broadcast_to, range(rank))
            self._made[key] = mask
        return mask

    def constant(self, shape: tuple[int, ...], dtype: Any, value: Any) -> Any:
        """An array of this (padded) shape filled with a known scalar, made once per trace."""
        scalar = np.asarray(value).astype(dtype)
        key = (_jax.current_trace(), shape, str(dtype), scalar.tobytes())
        if key not in self._made:
            self._made[key] = lax.full(shape, scalar, dtype)
        return self._made[key]

    def _make_mask(self, shape: Shape, axes: Sequence[int]) -> Any:
        mask = None
        for axis in axes:
            dims = [1] * len(shape)
            dims[axis] = self.padded(shape[axis])
            positions = lax.broadcasted_iota(jnp.int32, dims, axis)
            here = lax.lt(positions, lax.broadcast(self.logical(shape[axis]), dims))
            mask = here if mask is None else mask & here
        return mask


def bind_unique_names(wanted: str, taken: Iterable[str]) -> str:
    """``wanted``, or ``wanted_1``, ``wanted_2``, ... where it is taken."""
    used = set(taken)
    if wanted not in used:
        return wanted
    return next(n for i in itertools.count(1) if (n := f"{wanted}_{i}") not in used)
