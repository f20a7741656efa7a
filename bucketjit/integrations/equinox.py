"""Equinox: `filter_jit` in the place of ``equinox.filter_jit``.

A module of Equinox is a pytree, with activation functions, texts and numbers among its leaves.
`filter_jit` makes everything that is no array a part of the tree, which is static, so that the
bucketed function sees arrays alone; and so it does with results::

    model(weight, relu), x  ->  model(weight, Static(relu)), x  ->  the bucketed function

>>> import bucketjit, equinox as eqx, jax, numpy as np
>>> @bucketjit.integrations.equinox.filter_jit
... def apply(model, x):
...     return jax.vmap(model)(x)
>>> model = eqx.nn.MLP(3, 2, 8, 1, activation=jax.nn.tanh, key=jax.random.key(0))
>>> [apply(model, np.ones((n, 3), np.float32)).shape for n in (3, 5, 6)]
[(3, 2), (5, 2), (6, 2)]
>>> apply.cache_size()  # the buckets 4 and 8
2
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, Unpack, overload

import jax
import numpy as np

from bucketjit._api.executor import jit as bucketed
from bucketjit._api.options import Options
from bucketjit._arrays.padded import Padded
from bucketjit._extras import Extra
from bucketjit._ir.expressions import is_symbolic
from bucketjit._jax.tracers import literal_of
from bucketjit._runtime.call_path import P, R
from bucketjit._tracing.parameters import Static
from bucketjit.errors import ArgumentError, SpecError
from bucketjit.integrations._wrapped import Wrapped

__all__ = ["FilteredExec", "filter_jit"]

Donate = Literal["all", "all-except-first", "warn", "warn-except-first", "none"]

# The first position that is donated; None for none.
_DONATED = {"all": 0, "all-except-first": 1, "warn": 0, "warn-except-first": 1, "none": None}


class _Known(tuple[Any, ...]):
    """The value of a number in a result; empty if only a run of the program tells it.

    All are equal: what a trace knows does not distinguish the trees of two traces.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known)

    def __hash__(self) -> int:
        return hash(_Known)


@jax.tree_util.register_pytree_node_class
class _Number:
    """A Python number in a result, and a result of the program: it may be ``x.shape[0]``."""

    def __init__(self, number: Any, value: _Known) -> None:
        self.number = number
        self.value = value

    def tree_flatten(self) -> tuple[tuple[Any], _Known]:
        return (self.number,), self.value

    @classmethod
    def tree_unflatten(cls, value: _Known, leaves: tuple[Any]) -> _Number:
        return cls(*leaves, value)


@functools.cache
def _equinox() -> Any:
    with Extra("bucketed functions of Equinox modules", "equinox", "equinox"):
        import equinox

        return equinox


def _is_array(value: object) -> bool:
    """Whether a leaf is an array, or stands for one. Any value may be asked for."""
    return isinstance(value, Padded | jax.ShapeDtypeStruct) or bool(_equinox().is_array(value))


def _filtered(tree: Any, name: str) -> Any:
    """An argument in which each leaf that is no array is a `Static`."""

    def filtered(leaf: Any) -> Any:
        if _is_array(leaf):
            return leaf
        hash(leaf)  # a value that can change must not be remembered
        return Static(leaf)

    try:
        return jax.tree.map(filtered, tree)
    except TypeError:  # paths take long to make, so only an error has them
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            try:
                hash(None if _is_array(leaf) else leaf)
            except TypeError as error:
                raise ArgumentError(
                    f"{name}{jax.tree_util.keystr(path)}: expected an array, or a static value "
                    f"that can be hashed, got {type(leaf).__name__} ({error}); pass a tuple or a "
                    "frozenset in its place"
                ) from error
        raise


def _filtered_result(result: Any, is_symbolic_trace: bool) -> Any:
    """A result in which each leaf that is no array is a `Static`, or a `_Number`.

    Whether a number is one depends on its type alone, and not on whether it was computed from a
    size: so all traces of a function have results of the same tree.
    """

    def filtered(leaf: Any) -> Any:
        if _is_array(leaf):
            return leaf
        if is_symbolic(leaf):
            return _Number(leaf, _Known())
        if type(leaf) is float:
            return _Number(leaf, _Known((leaf,)))
        if type(leaf) is int and abs(leaf) < 2**31:
            return _Number(leaf, _Known((leaf,) if is_symbolic_trace else ()))
        return Static(leaf)

    return jax.tree.map(filtered, result)


def _restored(tree: Any) -> Any:
    def restored(leaf: Any) -> Any:
        if isinstance(leaf, Static):
            return leaf.value
        if not isinstance(leaf, _Number):
            return leaf
        if leaf.value:
            return leaf.value[0]
        literal = literal_of(leaf.number)  # inside of another transformation
        try:
            return int(leaf.number if literal is None else literal.val)
        except jax.errors.ConcretizationTypeError:
            return leaf.number

    return jax.tree.map(restored, tree, is_leaf=lambda x: isinstance(x, Static | _Number))


def _of_arrays(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function on filtered arguments; its results are filtered too."""

    @functools.wraps(fn, updated=())
    def on_arrays(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _restored((args, kwargs))
        shapes = [np.shape(x) for x in jax.tree.leaves((args, kwargs)) if _is_array(x)]
        is_symbolic_trace = any(is_symbolic(size) for shape in shapes for size in shape)
        return _filtered_result(fn(*args, **kwargs), is_symbolic_trace)

    return on_arrays


class FilteredExec(Wrapped[P, R]):
    """A bucketed function of Equinox modules; `filter_jit` makes it.

    It has the methods of `BucketedExec` that ask (``stats``, ``explain``, ``report``), its
    ``warmup``, and its ``with_...`` methods, which return another one. Modules are arguments of
    ``explain`` and ``warmup`` as of a call.

    Attributes:
        executor: The executor that runs the function on the arrays of the modules.
    """

    _of_arrays = staticmethod(_of_arrays)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function.

        Args:
            *args: The positional arguments.
            **kwargs: The keyword arguments.

        Returns:
            What the function returns.

        Raises:
            MissingExtraError: Equinox is not installed.
            ArgumentError: A static value cannot be hashed.
            Exception: What a call of the bucketed function raises; see `BucketedExec`.
        """
        plain, named = self._plain(args, kwargs)
        with warnings.catch_warnings() if self._is_quiet else contextlib.nullcontext():
            if self._is_quiet:
                warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            return _restored(self.executor(*plain, **named))

    def _plain(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        signer = self.executor._engine.signer
        sizes = signer.sizes_among(args, kwargs)

        def plain(where: int | str, value: Any, name: str) -> Any:
            is_plain = isinstance(value, jax.Array) or (type(value) is int and where in sizes)
            return value if is_plain else _filtered(value, name)

        return (
            tuple(plain(i, x, signer.name(i)) for i, x in enumerate(args)),
            {k: plain(k, x, k) for k, x in kwargs.items()},
        )


@overload
def filter_jit(
    fn: Callable[P, R], *, donate: Donate = "none", **options: Unpack[Options]
) -> FilteredExec[P, R]: ...


@overload
def filter_jit(
    fn: None = None, *, donate: Donate = "none", **options: Unpack[Options]
) -> Callable[[Callable[P, R]], FilteredExec[P, R]]: ...


def filter_jit(
    fn: Callable[..., Any] | None = None, *, donate: Donate = "none", **options: Any
) -> Any:
    """Compile a function of Equinox modules once per bucket of sizes.

    It takes the place of ``equinox.filter_jit``: arrays are traced, and everything else in the
    arguments is static. Results may hold what is no array. ``equinox.filter_grad`` and
    ``equinox.filter_value_and_grad`` of what this returns run in buckets.

    By default axis 0 of each argument that is an array is open; the axes of the arrays in a module
    are static. A Python int is static too, unless ``dynamic_axes`` names it as a size.

    Args:
        fn: The function, or a method of a module. Left out if the decorator has options.
        donate: Whose buffers may be reused, as in ``equinox.filter_jit``: those of all arguments,
            of all but the first, or of none. It covers arguments passed by position. ``"warn"``
            and ``"warn-except-first"`` are ``"all"`` and ``"all-except-first"`` with the warning
            of JAX of buffers that no result can reuse.
        **options: Those of `bucketjit.jit`, without ``static_argnums`` and ``static_argnames``. An
            entry of ``dynamic_axes`` for a module is ``None``.

    Returns:
        The function, or a decorator that makes it.

    Raises:
        SpecError: An option is malformed.
        TypeError: ``fn`` is not callable, or an option is unknown.

    Examples:
        >>> import bucketjit, equinox as eqx, jax, jax.numpy as jnp, numpy as np
        >>> @bucketjit.integrations.equinox.filter_jit(buckets=[4, 16], dynamic_axes=(None, "b, _"))
        ... def loss(model, x):
        ...     return jnp.mean(jax.vmap(model)(x) ** 2)
        >>> model = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
        >>> x = np.ones((5, 3), np.float32)
        >>> value, grads = eqx.filter_value_and_grad(loss)(model, x)
        >>> grads.layers[0].weight.shape, loss.explain(model, x).bucket["b"]
        ((8, 3), 16)
    """
    if donate not in _DONATED:
        raise SpecError(f"donate must be one of {list(_DONATED)}, got {donate!r}")
    for name in ("static_argnums", "static_argnames"):
        if options.get(name) is not None:
            raise SpecError(f"{name}: filter_jit makes static by itself what is no array")

    def decorate(fn: Callable[..., Any]) -> FilteredExec[..., Any]:
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {type(fn).__name__}")
        chosen = dict(options)
        first = _DONATED[donate]
        if first is not None:
            if any(chosen.get(f"donate_{name}") is not None for name in ("argnums", "argnames")):
                raise SpecError("give donate, or donate_argnums and donate_argnames, not both")
            chosen["donate_argnums"] = tuple(range(first, _positional(fn)))
        is_quiet = donate.startswith("all")
        return FilteredExec(fn, bucketed(_of_arrays(fn), **chosen), is_quiet=is_quiet)

    return decorate if fn is None else decorate(fn)


def _positional(fn: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds for p in inspect.signature(fn).parameters.values())
