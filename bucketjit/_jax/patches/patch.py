"""The record of a replacement of one function of JAX, and what installs such replacements.

The docstring of each says why the original is not enough, since when it is in JAX, and until when
the replacement is needed.

While a thread traces, `selecting` returns what makes computed sizes, or stops a trace that needs
one; see `bucketjit._tracing.computed`.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from bucketjit._jax.jaxprs import modules_of_jax, value_of_size


@dataclass(frozen=True)
class Patch:
    """A replacement of a function of JAX while a function of the user is traced.

    Attributes:
        owner: The module, class or table (a dict) that holds the original.
        name: The name, or key, of the original there.
        around: Makes what takes the original's place, given the original. Another patch may have
            replaced that before, so it is not known earlier.
        everywhere: Whether the original is replaced in every module that holds it under its name:
            user code may have imported it (``from jax.lax import scan``).
    """

    owner: Any
    name: Any
    around: Callable[[Any], Any]
    everywhere: bool = False


def patch(owner: Any, name: Any, everywhere: bool = False) -> Callable[[Callable[..., Any]], Patch]:
    """Make a patch of a function that takes the original before the arguments of the original."""
    return lambda function: Patch(owner, name, functools.partial(calling, function), everywhere)


def calling(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A function in the place of ``original``, which is the first argument of ``function``."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return replacement


def named_now(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of JAX that is looked up by its name in each call, as a patch may replace it.

    Any other function is returned as it is; of one in a `functools.partial`, another partial.
    """
    if isinstance(fn, functools.partial):
        return functools.partial(named_now(fn.func), *fn.args, **fn.keywords)
    module, name = getattr(fn, "__module__", None) or "", getattr(fn, "__name__", "")
    if not module.startswith(("jax.", "jax_")) or vars(sys.modules[module]).get(name) is not fn:
        return fn

    @functools.wraps(fn)
    def looked_up(*args: Any, **kwargs: Any) -> Any:
        return getattr(sys.modules[module], name)(*args, **kwargs)

    return looked_up


_ABSENT = object()  # of a name that the owner did not have, such as ``len`` in a module


class Replacing:
    """A context manager that installs patches while any thread is inside it. It nests.

    Attributes:
        patches: The patches.
    """

    def __init__(
        self, *patches: Patch, context: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.patches = patches
        self._context = context
        self._lock = threading.Lock()
        self._uses = weakref.WeakSet[object]()  # the contexts that are open, in all threads
        self._originals: list[tuple[Any, Any, Any]] = []  # in order of installation
        self._bare: dict[str, int] = {}  # modules without an original, and how many names they had

    @contextmanager
    def __call__(self) -> Iterator[None]:
        use = threading.Lock()  # any object that can be referenced weakly: it goes with the frame
        try:
            with self._lock:
                if not self._uses:
                    self._remove()  # what is there if an interrupt came in between
                    self._install()
                self._uses.add(use)
            with self._context():
                yield
        finally:
            with self._lock:
                self._uses.discard(use)
                if not self._uses:
                    self._remove()

    def misses(self, function: object) -> bool:
        """Whether a function is an original, in a place where its patch does not replace it."""
        return any(function is original for _, _, original in self._originals)

    def _install(self) -> None:
        wide = []
        for patch in self.patches:
            names = patch.owner if isinstance(patch.owner, dict) else vars(patch.owner)
            original = names.get(patch.name, _ABSENT)
            replacement = patch.around(original)
            if patch.everywhere:
                wide.append((patch.name, original, replacement))
            else:
                self._replace(patch.owner, patch.name, original, replacement)
        replaced = {name for name, _, _ in wide}
        for key, module in modules_of_jax().items() if wide else ():  # there are a thousand modules
            names = getattr(module, "__dict__", {})
            if self._bare.get(key) == len(names):
                continue
            held = []
            if not names.keys().isdisjoint(replaced):
                held = [each for each in wide if names.get(each[0]) is each[1]]
            for name, original, replacement in held:
                self._replace(module, name, original, replacement)
            if not held:
                self._bare[key] = len(names)

    def _remove(self) -> None:
        while self._originals:  # the last first: two patches may share a name
            _set(*self._originals[-1])
            self._originals.pop()  # only now: an interrupt may come in between

    def _replace(self, owner: Any, name: Any, original: Any, replacement: Any) -> None:
        self._originals.append((owner, name, original))
        _set(owner, name, replacement)


def _set(owner: Any, name: Any, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    elif value is not _ABSENT:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)
    else:
        setattr(owner, name, value)


# --- computed sizes -------------------------------------------------------------------------------

_of_thread = threading.local()  # `open`: what makes computed sizes, or None


def selecting() -> Any:
    """What makes sizes in this thread; None if JAX's own functions are to run."""
    return getattr(_of_thread, "open", None)


def opened(owner: Any, name: str, everywhere: bool = True) -> Callable[[Callable[..., Any]], Patch]:
    """Make a patch of a function that makes a computed size, until JAX has such sizes.

    Before the arguments of the original it takes what makes sizes in this thread, and the original.
    """
    return lambda function: Patch(owner, name, functools.partial(_opening, function), everywhere)


def _opening(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        open_ = selecting()
        if open_ is None:
            return original(*args, **kwargs)
        return function(open_, original, *args, **kwargs)

    return replacement


def is_traced(value: object) -> bool:
    """Whether the numbers of a value are known at run time only."""
    return isinstance(value, jax.core.Tracer) and value.to_concrete_value() is None


def is_open(value: Any) -> bool:
    """Whether a value is traced and has axes."""
    return isinstance(value, jax.core.Tracer) and np.ndim(value) > 0


def is_traced_size(value: Any) -> bool:
    """Whether a value is an integer that is known at run time only."""
    return is_traced(value) and np.ndim(value) == 0 and jnp.issubdtype(value.dtype, np.integer)


def has_traced_slice(idx: Any) -> bool:
    """Whether an end or a step of a slice in an index is known at run time only."""
    indices = idx if isinstance(idx, tuple) else (idx,)
    slices = (i for i in indices if isinstance(i, slice))
    return any(any(map(is_traced, (i.start, i.stop, i.step))) for i in slices)


def as_value(size: Any, dtype: Any = np.int32) -> Any:
    """A size, or an integer, as a scalar that the program computes with."""
    if is_symbolic_dim(size):
        size = value_of_size(size)
    if isinstance(size, jax.Array):
        return jax.lax.convert_element_type(size, dtype)
    return np.asarray(size, dtype)


def at_places(array: Any, places: Any, axis: int) -> Any:
    """The rows of an array at positions of an axis, which are moved inside of it.

    ``jnp.take`` asks whether there is any position, which is a decision on the size.
    """
    return array.at[(slice(None),) * axis + (places,)].get(mode="clip")


@contextmanager
def as_open(value: Any) -> Iterator[None]:
    """A context in which this makes the sizes of traces of this thread."""
    before = selecting()
    _of_thread.open = value
    try:
        yield
    finally:
        _of_thread.open = before
