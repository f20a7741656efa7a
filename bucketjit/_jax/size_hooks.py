"""Hooks on symbolic sizes, which report what user code asks of a size while it is traced.

What is reported are comparisons that JAX answers unsoundly, hashes, conversions and texts.
`number_hooks` has the hooks on arithmetic, and the reports of the thread that traces.
`bucketjit._tracing` turns reports into guards or refusals.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import jax
import numpy as np
from jax.errors import InconclusiveDimensionOperation
from jax.export import is_symbolic_dim

from bucketjit._jax import number_hooks
from bucketjit._jax.jaxprs import value_of_size
from bucketjit._jax.number_hooks import Size, fail, is_positive, report_raised, watching
from bucketjit._jax.patches.patch import Patch, Replacing
from bucketjit._jax.user_code import caller_caches, caller_decides, caller_is_user, text_line


@contextmanager
def watch_equalities(
    equality: Callable[[Any, Any], None],
    key: Callable[[Any], None],
    text: Callable[[str], None],
    error: Callable[[Exception], None],
) -> Iterator[None]:
    """Report every use of a symbolic size in which traced code may decide otherwise than unpadded.

    * ``n == 4``: equality must not raise, as hashing uses it, so JAX returns False where the answer
      is unknown. Only a hook on ``_DimExpr.__eq__`` (since 0.4.14) sees these answers.
    * ``if n % 2``: every symbolic size is true. It is reported as different from 0.
    * ``{4: w}.get(n)``: the hash of a size is not that of an int, so it is not compared with keys.
    * ``try: k = int(n)``: user code may catch what a size, or a number computed from sizes, raises.
    * ``f"{n}"``: the text is that of an expression.

    To user code, the class of a size is ``int``, as in the unpadded run. A hook calls the functions
    of the thread that it runs in.
    """
    reports = {"report": equality, "report_key": key, "report_text": text, "report_raised": error}
    previous = {name: getattr(watching, name, None) for name in reports}
    _let_sizes_pass_for_ints()
    with _hooked():
        vars(watching).update(reports)
        try:
            yield
        finally:
            vars(watching).update(previous)


_plain_eq = Size.__eq__

_plain_hash = Size.__hash__


def _reporting_eq(size: object, operand: object) -> Any:
    """The answer of ``size == operand``, reported if it is False and the caller decides by it."""
    report = getattr(watching, "report", None)
    if report is not None and isinstance(operand, jax.Array | np.ndarray):
        return _equal_to_array(size, operand)
    answer = _plain_eq(size, operand)
    if report is not None and answer is False and caller_decides():
        report(size, operand)
    return answer


def _reporting_ne(size: object, operand: object) -> Any:
    answer = _reporting_eq(size, operand)
    return not answer if isinstance(answer, bool) else ~answer


def _equal_to_array(size: Any, array: Any) -> Any:
    """``size == array``, elementwise as for an int; JAX's own answer is False."""
    if not isinstance(array, np.ndarray):
        return jax.numpy.equal(value_of_size(size), array)
    numbers = array.ravel().tolist()
    equal = [_plain_eq(size, number) for number in numbers]
    for number, answer in zip(numbers, equal, strict=True):
        if answer is False:
            watching.report(size, number)
    return np.array(equal, bool).reshape(array.shape)


def _missing(name: str) -> Callable[..., Any]:
    """An operator that ints have and sizes lack: it raises ``TypeError``, with a report."""

    def operator(self: object, *operands: object) -> Any:
        if any(isinstance(x, jax.Array | np.ndarray) for x in operands):
            return NotImplemented
        fail(TypeError(f"a symbolic size has no {name}"))

    return operator


def _no_index(self: object) -> int:
    fail(TypeError("'_DimExpr' object cannot be interpreted as an integer"))


class LengthIsInt(TypeError):
    """``len(x)`` of an array whose axis 0 is symbolic, which Python requires to be an int."""


_plain_len = jax.core.Tracer.__len__


def _length(self: Any) -> Any:
    size = _plain_len(self)
    if isinstance(size, Size) and getattr(watching, "report", None) is not None:
        fail(LengthIsInt("len() of an array is always an int"))
    return size


class SizeAttributeError(AttributeError):
    """An attribute that a symbolic size does not have."""


def _no_attribute(self: object, name: str) -> Any:
    error = SizeAttributeError(f"a symbolic size has no attribute {name!r}")
    # The unpadded run has the attributes of `int`. A ufunc of NumPy reads the method of its name.
    if hasattr(int, name) or isinstance(getattr(np, name, None), np.ufunc):
        report_raised(error)
    raise error


def _class_of_size(self: object) -> type:
    """``int`` for traced user code, so that ``isinstance`` takes the branch of the unpadded run."""
    if getattr(watching, "report", None) is not None and caller_is_user():
        return int
    return Size


@functools.cache
def _let_sizes_pass_for_ints() -> None:
    """Make ``isinstance(size, int)`` call `_class_of_size`.

    ``isinstance`` reads ``__class__`` if the type itself is not a subclass. Assigning to
    ``_DimExpr.__class__`` would change the class of the class. Only its dict, behind the read-only
    proxy that ``vars`` returns, takes a property of that name.
    """
    (attributes,) = gc.get_referents(vars(Size))
    attributes["__class__"] = property(_class_of_size)
    # The interpreter caches attributes of a class; an ordinary assignment to it drops the cache.
    setattr(Size, "_passes_for_int", True)  # noqa: B010


def _reporting_bool(self: object) -> bool:
    # Whoever the caller is: JAX decides by it, too. The gradient of rfft asks ``not n % 2``.
    report = getattr(watching, "report", None)
    if report is not None and not is_positive(self):
        report(self, 0)
    return True


def _reporting_hash(self: object) -> int:
    report = getattr(watching, "report_key", None)
    if report is not None and caller_decides() and not caller_caches():
        report(self)
    return _plain_hash(self)


def _text_of(
    kind: type, name: str, tells_a_size: Callable[[Any], bool] = lambda value: True
) -> Callable[..., str]:
    """A method that makes a text, with a report if user code calls it on what shows a size."""
    plain = getattr(kind, name)

    @functools.wraps(plain)
    def text(self: object, *args: object, **kwargs: object) -> str:
        report = getattr(watching, "report_text", None)
        if report is not None and tells_a_size(self) and (line := text_line()) is not None:
            report(line)
        shown: str = plain(self, *args, **kwargs)
        return shown

    return text


_ONLY_OF_INTS = number_hooks.special_names(
    "lshift rlshift rshift rrshift and rand or ror xor rxor invert round trunc ceil floor float "
    "complex abs pos"
)

_HOOKS: dict[str, Callable[..., Any]] = {
    "__eq__": _reporting_eq,
    "__ne__": _reporting_ne,
    "__bool__": _reporting_bool,
    "__hash__": _reporting_hash,
    "__str__": _text_of(Size, "__str__"),
    "__repr__": _text_of(Size, "__repr__"),
    "__index__": _no_index,
    "__getattr__": _no_attribute,
    "__pow__": number_hooks.power,
    "__rpow__": number_hooks.exponent,
    **{
        name: number_hooks.reporting(getattr(Size, name), InconclusiveDimensionOperation)
        for name in number_hooks.special_names("ge le gt lt int")
    },
    **{name: number_hooks.operation_with_number(name) for name in number_hooks.WITH_NUMBERS},
    **{name: number_hooks.whole_operation(name) for name in number_hooks.WHOLE_OPERATORS},
    **{name: _missing(name) for name in _ONLY_OF_INTS if not hasattr(Size, name)},
}


def _type_hooks(kind: Any) -> dict[str, Callable[..., Any]]:
    """Hooks of a class whose ``==``, hash and text depend on a shape.

    JAX itself compares and hashes types all the time, so only user code counts. For it the hook
    compares, or hashes, the shapes once more: the hooks on sizes then see that user code asks.
    """
    plain_eq, plain_hash = kind.__eq__, kind.__hash__

    def eq(self: Any, operand: Any) -> Any:
        if _is_watched_user() and self is not operand and type(operand) is type(self):
            _ = self.shape == operand.shape  # runs `_reporting_eq` for the user
        return plain_eq(self, operand)

    def hashed(self: Any) -> int:
        if _is_watched_user():
            hash(self.shape)
        return plain_hash(self)

    names = ("__repr__", "__str__", "str_short")
    methods = [name for name in names if isinstance(getattr(kind, name, None), FunctionType)]
    is_open = lambda value: any(map(is_symbolic_dim, value.shape))  # noqa: E731
    texts = {name: _text_of(kind, name, is_open) for name in methods}
    return {"__eq__": eq, "__hash__": hashed, **texts}


def _is_watched_user() -> bool:
    return getattr(watching, "report", None) is not None and caller_is_user()


_TRACER_HOOKS: dict[str, Callable[..., Any]] = {
    # An array is a tracer in the unpadded run too, so its text counts only for a number.
    "__repr__": _text_of(jax.core.Tracer, "__repr__", number_hooks.is_number_of_sizes),
    "__len__": _length,
    **number_hooks.CONVERSIONS,
}


_hooked = Replacing(
    *(
        Patch(kind, name, functools.partial(lambda hook, original: hook, hook))
        for kind, hooks in (
            (Size, _HOOKS),
            (jax.core.ShapedArray, _type_hooks(jax.core.ShapedArray)),
            (jax.ShapeDtypeStruct, _type_hooks(jax.ShapeDtypeStruct)),
            (jax.core.Tracer, _TRACER_HOOKS),
        )
        for name, hook in hooks.items()
    )
)
"""While active, symbolic sizes, and what has a shape, report."""
