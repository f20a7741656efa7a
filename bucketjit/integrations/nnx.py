"""Flax NNX: `jit` in the place of ``flax.nnx.jit``.

A module of NNX is an object that functions change. `jit` splits each module, optimizer, metric and
``Rngs`` in the arguments into a graph definition, which is static, and its arrays; the bucketed
function runs the function on the arrays; and what the function changed is written back::

    model, optimizer, x  ->  (graph, arrays), (graph, arrays), x  ->  the bucketed function
    model, optimizer     <-  (graph, arrays), (graph, arrays)     <-

>>> import bucketjit, jax.numpy as jnp, numpy as np
>>> from flax import nnx
>>> @bucketjit.integrations.nnx.jit
... def count(metric, x):
...     metric.update(values=x)
>>> metric = nnx.metrics.Average()
>>> for n in (3, 5, 6):
...     count(metric, np.full(n, n, np.float32))
>>> round(float(metric.compute()), 3), count.cache_size()  # the buckets 4 and 8
(5.0, 2)
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack, overload

import jax
import numpy as np

from bucketjit._api.executor import jit as bucketed
from bucketjit._api.options import Options
from bucketjit._arrays.padding import without_padding
from bucketjit._extras import Extra
from bucketjit._runtime.call_path import P, R
from bucketjit.errors import SpecError
from bucketjit.integrations._wrapped import Wrapped

__all__ = ["ModuleExec", "jit"]


@jax.tree_util.register_pytree_with_keys_class
class _Node:
    """A module, or another node of a graph, as a pytree: its arrays, and how they hang together."""

    def __init__(self, graph: Any, arrays: Sequence[Any], node: Any = None) -> None:
        self.graph = graph
        self.arrays = arrays
        self._node = node

    def tree_flatten(self) -> tuple[Sequence[Any], Any]:
        return self.arrays, self.graph

    def tree_flatten_with_keys(self) -> tuple[Sequence[tuple[Any, Any]], Any]:
        paths: Sequence[Any] = range(len(self.arrays))
        if self._node is not None:
            _, flat = _flax().graph.flatten(self._node)
            # The arrays that came with an earlier argument are not among its own.
            if len(flat.paths) == len(self.arrays):
                paths = [".".join(map(str, path)) or "value" for path in flat.paths]
        keys = [
            jax.tree_util.SequenceKey(p) if isinstance(p, int) else jax.tree_util.GetAttrKey(p)
            for p in paths
        ]
        return list(zip(keys, self.arrays, strict=True)), self.graph

    @classmethod
    def tree_unflatten(cls, graph: Any, arrays: Sequence[Any]) -> _Node:
        return cls(graph, list(arrays))


@functools.cache
def _flax() -> Any:
    with Extra("bucketed functions of NNX modules", "flax", "nnx"):
        from flax import nnx

        return nnx


def _is_node(value: object) -> bool:
    nnx = _flax()
    return isinstance(value, nnx.Variable) or nnx.graph.is_graph_node(value)


def _split(tag: object, tree: Any) -> Any:
    """A tree with a `_Node` for each module. A reference that occurs twice is kept as such."""
    with _flax().split_context(tag) as context:

        def split(value: Any) -> Any:
            if not _is_node(value):
                return value
            graph, arrays = context.flatten(value, with_paths=False)
            return _Node(graph, arrays, value)

        return jax.tree.map(split, tree, is_leaf=_is_node)


def _merged(tag: object, tree: Any, *, inner: bool) -> Any:
    """The tree that was split.

    Outside of the function (not ``inner``), nodes that came as arguments are updated, and are
    themselves in the result.
    """
    with _flax().merge_context(tag, inner=inner) as context:
        return _with_nodes(lambda node: context.unflatten(node.graph, node.arrays), tree)


def _with_nodes(change: Callable[[_Node], Any], tree: Any) -> Any:
    """A tree with each `_Node` changed."""

    def is_node(x: object) -> bool:
        return isinstance(x, _Node)

    return jax.tree.map(lambda x: change(x) if is_node(x) else x, tree, is_leaf=is_node)


def _of_arrays(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function on split arguments: returns the nodes of the arguments, and the results."""

    @functools.wraps(fn, updated=())
    def on_arrays(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        nnx = _flax()
        # A trace may run without a call, or in another thread, so it has a context of its own.
        tag = object()
        with nnx.update_context(tag):
            args, kwargs = _merged(tag, (args, kwargs), inner=True)
            result = fn(*args, **kwargs)
            nodes = [x for x in jax.tree.leaves((args, kwargs), is_leaf=_is_node) if _is_node(x)]
            split = _split(tag, (nodes, result))
        assert isinstance(split, tuple)
        return split

    return on_arrays


def _on_host(tree: Any) -> Any:
    """The arrays of a result in host memory; those of modules stay where they are."""
    return jax.tree.map(
        lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, tree, is_leaf=_is_node
    )


class ModuleExec(Wrapped[P, R]):
    """A bucketed function of NNX modules; `jit` makes it.

    It has the methods of `BucketedExec` that ask (``stats``, ``explain``, ``report``), its
    ``warmup``, and its ``with_...`` methods, which return another one. Modules are arguments of
    ``explain`` and ``warmup`` as of a call.

    Attributes:
        executor: The executor that runs the function on the arrays of the modules.
    """

    _of_arrays = staticmethod(_of_arrays)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function, and write back what it changes in its arguments.

        Args:
            *args: The positional arguments.
            **kwargs: The keyword arguments.

        Returns:
            What the function returns.

        Raises:
            MissingExtraError: Flax is not installed.
            Exception: What a call of the bucketed function raises; see `BucketedExec`. No argument
                is changed then.
        """
        with _flax().update_context(self):
            args, kwargs = _split(self, (args, kwargs))
            returned = self.executor(*args, **kwargs)
            if self._out == "padded":
                # Modules hold arrays of logical sizes; arrays outside of them stay padded.
                returned = _with_nodes(
                    lambda node: _Node(node.graph, without_padding(node.arrays)), returned
                )
            _, result = _merged(self, returned, inner=False)
        return _on_host(result) if self._out == "numpy" else result

    def _plain(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with _flax().update_context(self):
            plain = _split(self, (args, dict(kwargs)))
        assert isinstance(plain, tuple)
        return plain


def _refuse_bound(fn: Callable[..., Any]) -> None:
    """Refuse a module and its bound methods: its arrays would be constants of the program."""
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    owner = getattr(inner, "__self__", inner)
    if "flax.nnx" in sys.modules and _is_node(owner):
        name = type(owner).__name__
        method = getattr(inner, "__name__", "__call__")
        raise SpecError(
            f"fn is bound to a {name}, whose later changes it would not see; decorate the method "
            f"in the class, or wrap {name}.{method} and pass the module as its first argument"
        )


@overload
def jit(fn: Callable[P, R], **options: Unpack[Options]) -> ModuleExec[P, R]: ...


@overload
def jit(
    fn: None = None, **options: Unpack[Options]
) -> Callable[[Callable[P, R]], ModuleExec[P, R]]: ...


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function of NNX modules once per bucket of sizes.

    It takes the place of ``flax.nnx.jit``. Modules, optimizers, metrics, ``Rngs`` and variables may
    be in any argument, in containers, and in results. What the function changes in an argument is
    changed after the call: values of variables, new variables, attributes. References that
    arguments share, such as those of a model and its optimizer, stay shared.

    Everything in a module that is no array is static: with another value the function is traced
    again. The axes of the arrays in a module are static, unless ``dynamic_axes`` opens them.

    Args:
        fn: The function, or a method of a module. Left out if the decorator has options.
        **options: Those of `bucketjit.jit`. ``donate_argnums`` and ``donate_argnames`` may name
            modules. An entry of ``dynamic_axes`` for a module is ``None``. With ``out`` other than
            ``"jax"``, the arrays in modules are those of JAX nevertheless.

    Returns:
        The function, or a decorator that makes it.

    Raises:
        SpecError: An option is malformed, or ``fn`` is a module, or a method of one.
        TypeError: ``fn`` is not callable, or an option is unknown.

    Examples:
        >>> import bucketjit, jax.numpy as jnp, numpy as np, optax
        >>> from flax import nnx
        >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        >>> @bucketjit.integrations.nnx.jit(donate_argnames=("model", "optimizer"))
        ... def train_step(model, optimizer, x, y):
        ...     def loss_of(model):
        ...         return jnp.mean((model(x) - y) ** 2)
        ...     loss, grads = nnx.value_and_grad(loss_of)(model)
        ...     optimizer.update(model, grads)
        ...     return loss
        >>> losses = []
        >>> for n in (7, 8, 5, 3):
        ...     x = np.ones((n, 3), np.float32)
        ...     losses.append(float(train_step(model, optimizer, x, x[:, :1])))
        >>> losses == sorted(losses, reverse=True), train_step.stats().compiles
        (True, 1)
    """

    def decorate(fn: Callable[..., Any]) -> ModuleExec[..., Any]:
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {type(fn).__name__}")
        _refuse_bound(fn)
        out = options.get("out", "jax")
        # NumPy arrays in modules would go to the device again in each call.
        chosen = {**options, "out": "jax"} if out == "numpy" else options
        return ModuleExec(fn, bucketed(_of_arrays(fn), **chosen), out)

    return decorate if fn is None else decorate(fn)
