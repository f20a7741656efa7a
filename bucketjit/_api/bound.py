"""A bucketed function as a method of an object."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Concatenate, Generic, ParamSpec, Self, overload

from bucketjit._runtime.call_path import P, R

Q = ParamSpec("Q")

# Methods that take the arguments of a call.
_OF_CALLS = ("explain", "export_bounded", "export_dynamic", "lower", "trace", "warmup")


class BoundMethod(Generic[P, R]):
    """A bucketed function with the object it is a method of, which is the first argument.

    ``obj.method.map``, ``explain``, ``lower`` and the like have it, too, unlike those of a
    ``types.MethodType``, which hands on the attributes of its function as they are.
    """

    __slots__ = ("__func__", "__self__")

    def __init__(self, function: Any, instance: object) -> None:
        self.__func__ = function
        self.__self__ = instance

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function; see `BucketedExec.__call__`."""
        return self.__func__(self.__self__, *args, **kwargs)

    def _mapping(self, method: Any, /, *args: Any, in_axes: Any = None, **kwargs: Any) -> Any:
        """A call of ``map``, whose examples share the object; ``in_axes`` does not speak of it."""
        if not isinstance(in_axes, Mapping | None):
            of_args = in_axes if isinstance(in_axes, tuple | list) else [in_axes] * len(args)
            in_axes = (None, *of_args)
        return method(self.__self__, *args, in_axes=in_axes, **kwargs)

    def save(self, path: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Write the function to a file; see `BucketedExec.save`."""
        return self.__func__.save(path, self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.__func__, name)
        if name in ("map", "explain_map"):
            return functools.partial(self._mapping, method)
        if name in _OF_CALLS:
            return functools.partial(method, self.__self__)
        if not name.startswith("with_"):
            return method

        @functools.wraps(method)
        def builder(*args: Any, **kwargs: Any) -> Any:
            return type(self)(method(*args, **kwargs), self.__self__)

        return builder

    def __reduce__(self) -> Any:
        return type(self), (self.__func__, self.__self__)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BoundMethod):
            return NotImplemented
        return self.__func__ is other.__func__ and self.__self__ is other.__self__

    def __hash__(self) -> int:
        return hash((id(self.__func__), id(self.__self__)))

    def __repr__(self) -> str:
        return f"<bound method {self.__func__!r} of {self.__self__!r}>"


class Bindable(Generic[P, R]):
    """A bucketed function that may be a method of a class."""

    @overload
    def __get__(self, instance: None, owner: object = None) -> Self: ...

    @overload
    def __get__(
        self: Bindable[Concatenate[Any, Q], R], instance: object, owner: object = None
    ) -> BoundMethod[Q, R]: ...

    def __get__(self, instance: object, owner: object = None) -> Any:
        """Bind to an instance if the function is a method of a class, as ``jax.jit`` does."""
        return self if instance is None else BoundMethod(self, instance)
