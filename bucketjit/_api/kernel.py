"""What users call in their functions: `kernel`, which nobody can look into, and `sized`."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.tree_util import keystr, tree_flatten_with_path

from bucketjit._ir.expressions import Dim, compiled, is_symbolic, split_at_commas, variables_of
from bucketjit._ir.kernels import KernelCall, resized
from bucketjit._jax.jaxprs import shaped, value_of_size
from bucketjit._jax.number_hooks import watching
from bucketjit._jax.patches.patch import selecting
from bucketjit._raised import in_one_line
from bucketjit.errors import ArgumentError, SizeMismatchError, SpecError

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_MULTIPLE, _TYPED = re.compile(r"([^\W\d]\w*) *% *([1-9]\d*)"), re.compile(r"(\w+)\[(.*)\]")


def kernel(*axes: Any, out: Any, fill: Any = None, **named_axes: Any) -> Callable[[F], F]:
    """Declare the sizes of a function that bucketjit cannot look into, and call it in buckets.

    Kernels of Pallas and foreign functions are such; see the page *Kernels inside*. In a bucketed
    function they get padded arrays, with anything in the padding, and the logical sizes. Results
    are cut, and must not depend on the padding. Elsewhere only sizes with a multiple are padded.
    Reverse derivatives are those of the function at padded shapes.

    Args:
        *axes: For each parameter of the function, in their order, the axes of the array: a text
            such as ``"b, n%8, n + 1, _"``, or a prefix of its tree with such texts. ``n`` is a size
            by name, ``n%8`` one that the function takes in multiples of 8 only, ``_`` an axis that
            is never padded. A parameter without axes, or with None, takes static arguments.
        out: The axes of the results, a text or a tree of texts. The dtype is that of the first
            array; ``"int32[b, n]"`` has another one.
        fill: What the padding of arrays is to hold: a number, or a dict of numbers by parameter.
        **named_axes: The axes of more parameters, by name.

    Returns:
        A decorator. The function has a parameter ``sizes`` besides, which callers do not give: the
        logical sizes by name, int32 scalars.

    Raises:
        SpecError: The declaration is malformed, or does not fit the function.
        ArgumentError: In a call, an argument or a result does not fit its axes.

    Examples:
        >>> import jax.numpy as jnp, numpy as np
        >>> import bucketjit
        >>> @bucketjit.kernel("n%8, d", out="d")
        ... def total(x, sizes):  # as if it were a kernel of blocks of 8 rows
        ...     return jnp.where(jnp.arange(x.shape[0])[:, None] < sizes["n"], x, 0).sum(0)
        >>> total(np.ones((3, 2), np.float32)).tolist()
        [3.0, 3.0]
        >>> mean = bucketjit.jit(lambda x: total(x) / x.shape[0], buckets="pow2")
        >>> mean(np.ones((3, 2), np.float32)).tolist()
        [1.0, 1.0]
    """

    def declare(function: F) -> F:
        target = _Declaration(function, axes, named_axes, out, fill)
        call: Any = functools.wraps(function)(lambda *args, **kwargs: target.call(args, kwargs))
        call.__signature__ = target.signature
        return cast(F, call)

    return declare


@dataclass(frozen=True)
class _Axes:
    """The axes of an array as declared, multiples by name, and the dtype of a result, or None."""

    text: str
    dims: tuple[str, ...]
    multiples: Mapping[str, int]
    dtype: Any

    def at(self, sizes: Mapping[str, Dim], shape: Sequence[Dim] = ()) -> tuple[Dim, ...]:
        """The shape at some sizes; ``shape`` has the sizes of axes without a name."""
        return tuple(
            shape[i] if dim == "_" else compiled(dim, "int")(*(sizes[v] for v in variables_of(dim)))
            for i, dim in enumerate(self.dims)
        )


def _parsed(where: str, text: Any, anonymous: str = "_") -> _Axes:
    dims: list[str] = []
    multiples: dict[str, int] = {}
    try:
        typed = _TYPED.fullmatch(text.strip())
        inside = typed[2] if typed else text
        for part in split_at_commas(inside) if inside.strip() else ():
            if multiple := _MULTIPLE.fullmatch(part):
                part, multiples[multiple[1]] = multiple[1], int(multiple[2])
            dims.append(part if part == anonymous else str(export.symbolic_shape(part)[0]))
        return _Axes(text, tuple(dims), multiples, jnp.dtype(typed[1]) if typed else None)
    except Exception as error:
        why = f"got {text!r} ({in_one_line(error)})"
        raise SpecError(f'kernel: {where}: expected axes such as "b, n%8", {why}') from None


class _Declaration:
    """A function with the axes of its arguments and results; ``signature`` is without sizes."""

    def __init__(self, function: Any, axes: Any, named: Any, out: Any, fill: Any) -> None:
        self._function, self._multiples = function, dict[str, int]()
        self._name = name = getattr(function, "__name__", type(function).__name__)
        self.signature = inspect.signature(function)
        parameters = dict(self.signature.parameters)
        if parameters.pop("sizes", None) is None or len(axes) > len(parameters):
            raise SpecError(f"kernel: {name} needs parameters for {len(axes)} axes, and sizes")
        self.signature = self.signature.replace(parameters=list(parameters.values()))
        trees = {p: t for p, t in zip(parameters, axes, strict=False) if t is not None} | named
        fills = fill if isinstance(fill, Mapping) else dict.fromkeys(trees, fill)
        if unknown := sorted({*trees, *fills} - (parameters.keys() & trees.keys())):
            raise SpecError(f"kernel: {name} has no parameter {unknown[0]!r} with axes")
        self._axes = {
            p: jax.tree.map(functools.partial(_parsed, f"{name}: {p}"), t) for p, t in trees.items()
        }
        self._fills = [fills.get(p) for p in trees]
        self._out_tree: Any = jax.tree_util.tree_structure(out)
        self._outs = [_parsed(f"{name}: out", text, "") for text in jax.tree.leaves(out)]
        declared: list[_Axes] = jax.tree.leaves(self._axes)
        names = {dim for part in declared for dim in part.dims if dim.isidentifier()}
        for part in (*declared, *self._outs):
            if unknown := sorted({v for dim in part.dims for v in variables_of(dim)} - names):
                raise SpecError(f"{name}: no axis has the size {unknown[0]} of {part.text!r}")
            for size, multiple in part.multiples.items():
                self._multiples[size] = math.lcm(multiple, self._multiples.get(size, 1))

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the function: by an equation in a trace with symbolic sizes, else at once."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        static = {p: v for p, v in bound.arguments.items() if p not in self._axes}
        for path, leaf in tree_flatten_with_path(static)[0]:
            if is_symbolic(leaf) or isinstance(leaf, jax.Array | np.ndarray):
                where = f"{self._name}: {keystr(path)[2:-2]} is an array or an open size"
                raise ArgumentError(f'{where}; declare its axes ("" for a scalar)')
        leaves, tree = jax.tree_util.tree_flatten([bound.arguments[p] for p in self._axes])
        arrays = [x if hasattr(x, "shape") else jnp.asarray(x) for x in map(value_of_size, leaves)]
        axes, fills, sizes = self._sizes(tree, arrays)
        closed = (tuple(i for i, dim in enumerate(part.dims) if dim == "_") for part in axes)
        run, kinds = self._runner(static, tree, axes, fills), tuple(zip(fills, closed, strict=True))
        call = KernelCall(self._name, run, kinds, self._multiples)
        is_open = any(is_symbolic(dim) for x in arrays for dim in x.shape)
        # In a trace with symbolic sizes, one may be that of rows which ``vmap`` hides here.
        if not is_open and getattr(watching, "report", None) is None:
            outs = call.run({name: jnp.int32(dim) for name, dim in sizes.items()}, *arrays)
        else:
            of = [jax.ShapeDtypeStruct(x.at(sizes), x.dtype or arrays[0].dtype) for x in self._outs]
            outs = call(arrays, tuple(sizes.items()), tuple(map(shaped, of)))
        return jax.tree_util.tree_unflatten(self._out_tree, outs)

    def _sizes(self, tree: Any, arrays: Sequence[Any]) -> tuple[list[_Axes], list[Any], Any]:
        """The axes of each array, what fills it, and the size of each name."""
        flat: list[tuple[str, _Axes, Any]] = []

        def add(path: Any, axes: _Axes, part: Any) -> None:
            where, fill = list(self._axes)[path[0].idx], self._fills[path[0].idx]
            for more, _ in tree_flatten_with_path(part)[0]:
                flat.append((where + keystr((*path[1:], *more)), axes, fill))

        try:
            arguments = jax.tree_util.tree_unflatten(tree, arrays)
            jax.tree_util.tree_map_with_path(add, list(self._axes.values()), arguments)
        except ValueError as error:
            why = f"{self._name}: its arguments are no trees as declared: {in_one_line(error)}"
            raise ArgumentError(why) from None
        sizes: dict[str, Dim] = {}
        for (path, axes, _), x in zip(flat, arrays, strict=True):
            if len(x.shape) != len(axes.dims):
                shown = jax.typeof(x).str_short()
                raise ArgumentError(f"{self._name}: {path} is {shown}, expected {axes.text!r}")
            names = zip(axes.dims, x.shape, strict=True)
            sizes = {dim: n for dim, n in names if dim.isidentifier() and dim != "_"} | sizes
        for (path, axes, _), x in zip(flat, arrays, strict=True):
            for dim, size, want in zip(axes.dims, x.shape, axes.at(sizes, x.shape), strict=True):
                # Not by ``==``: sizes that may be equal become so by a guard, by this message.
                if str(size) != str(want):
                    got = f"{self._name}: {path} has {dim} of size ({size})"
                    raise SizeMismatchError(f"{got}, expected ({want})")
        return [part[1] for part in flat], [part[2] for part in flat], sizes

    def _runner(self, static: Any, tree: Any, axes: Sequence[_Axes], fills: Any) -> Any:
        """The function of logical sizes and arrays, which are padded to multiples inside."""

        def run(sizes: Mapping[str, Any], *arrays: Any) -> list[Any]:
            operands = list(zip(axes, fills, arrays, strict=True))
            real: dict[str, Any] = {}
            for part, _, x in operands:
                real |= zip(part.dims, x.shape, strict=True)
            wide = real | {v: -(-max(real[v], 1) // m) * m for v, m in self._multiples.items()}
            padded = [resized(x, part.at(wide, x.shape), fill or 0) for part, fill, x in operands]
            named = zip(self._axes, jax.tree_util.tree_unflatten(tree, padded), strict=True)
            bound = inspect.BoundArguments(self.signature, OrderedDict([*static.items(), *named]))
            value = self._function(*bound.args, **bound.kwargs, sizes=dict(sizes))
            outs, out_tree = jax.tree_util.tree_flatten(value)
            got = [(tuple(x.shape), x.dtype) for x in map(jax.typeof, outs)]
            want = [(part.at(wide), part.dtype or arrays[0].dtype) for part in self._outs]
            if out_tree != self._out_tree or got != want:
                shown = jax.tree.map(jax.typeof, value)
                raise ArgumentError(f"{self._name} returns {shown}, and out declares {want}")
            shapes = (part.at(real) for part in self._outs)
            return list(map(resized, map(jnp.asarray, outs), shapes))

        return run


# --- sized ---


def sized(tree: T, n: object, axis: int = 0) -> T:
    """Cut arrays to their first ``n`` positions, where ``n`` may be computed in the program.

    In a function that a bucketed function traces, the results have a size that is known at run time
    only, and all later operations are masked by it. Outside of a trace this is a slice.

    Args:
        tree: An array, or a pytree of arrays, all of one size along the axis.
        n: The number of positions: an integer scalar from 0 to that size.
        axis: The axis.

    Returns:
        The arrays, cut.

    Raises:
        ArgumentError: ``n`` is no integer scalar, or is out of bounds; ``tree`` holds no array; the
            arrays differ in size along the axis, or lack it. In a bucketed function, an ``n`` out
            of bounds is noticed when the program has run.
        TypeError: ``n`` is traced by ``jax.jit`` outside of a bucketed function.

    Examples:
        >>> import jax.numpy as jnp, numpy as np
        >>> import bucketjit
        >>> @bucketjit.jit
        ... def before_the_first_zero(x):
        ...     return bucketjit.sized(x, jnp.argmax(x == 0)).sum()
        >>> float(before_the_first_zero(np.array([1, 2, 0, 4, 5], np.float32)))
        3.0
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    if not leaves:
        raise ArgumentError("sized: expected arrays, got a tree without any")
    arrays = [x if isinstance(x, jax.Array | np.ndarray) else jnp.asarray(x) for x in leaves]
    for x in arrays:
        if not -x.ndim <= axis < x.ndim:
            raise ArgumentError(f"sized: there is no axis {axis} in an array of shape {x.shape}")
    rows = arrays[0].shape[axis]
    if others := [x.shape for x in arrays if x.shape[axis] != rows]:
        raise ArgumentError(
            f"sized: expected arrays of one size along axis {axis}, got shapes {arrays[0].shape} "
            f"and {others[0]}"
        )
    if isinstance(n, jax.Array | np.ndarray | np.generic):
        is_whole = n.ndim == 0 and bool(jnp.issubdtype(n.dtype, jnp.integer))
    else:
        is_whole = isinstance(n, int) and not isinstance(n, bool)
    if not is_whole:
        shown = jax.typeof(n).str_short() if isinstance(n, jax.Array | np.ndarray) else repr(n)
        raise ArgumentError(f"sized: expected an integer scalar n, got {shown}")
    if not isinstance(n, jax.core.Tracer):
        size = operator.index(n)  # type: ignore[arg-type]
        if size < 0 or size > rows:
            raise ArgumentError(
                f"sized: n is {size}, and the arrays have {rows} rows; give a number from 0 to "
                f"{rows}"
            )
        cut = [x[(slice(None),) * (axis % x.ndim) + (slice(size),)] for x in arrays]
    else:
        opened = selecting()
        if opened is None:
            raise TypeError(
                "sized: n is traced, so its value is not known. Call the function by a "
                "bucketjit.BucketedExec, which computes sizes in the program; under jax.jit a "
                "size must be a Python int"
            )
        first = [jnp.moveaxis(jnp.asarray(x), axis, 0) for x in arrays]
        cut = [jnp.moveaxis(x, 0, axis) for x in opened.cut(first, n)]
    return jax.tree_util.tree_unflatten(structure, cut)
