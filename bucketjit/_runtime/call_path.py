"""The path of a call: the handler of its shapes, or else the engine.

A bucketed function and a function that was loaded from a file have the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Generic, ParamSpec, TypeVar

from bucketjit._arrays.padded import Padded
from bucketjit._arrays.padding import copied
from bucketjit._compile.executable import SignatureChanged
from bucketjit._jax.arrays import NotPlaced
from bucketjit._jax.config import NO_TRACE, THREAD_TRACE, jit_disabled
from bucketjit._jax.tracebacks import shortened
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.fast_path.bucket_handler import Evicted
from bucketjit._runtime.fast_path.dispatch import FastPath
from bucketjit._tracing.computed.sizes import NothingSelected
from bucketjit._tracing.leaf_types import note_arguments

P = ParamSpec("P")
R = TypeVar("R")


class CallPath(Generic[P, R]):
    """A callable whose calls an engine serves."""

    __wrapped__: Callable[P, R]
    _engine: Engine
    _fast_path: FastPath
    _of_copies: Callable[..., Any] | None
    _inside: Any  # the method that makes a call inside a transformation, or without ``jit``
    _plain: Callable[[tuple[Any, ...], Mapping[str, Any]], Any] | None = None
    _equations: Any = None  # makes those that are masked, of a program that is not traced here
    # Puts arguments by name into the places where they are known.
    _in_places: Any = staticmethod(lambda args, kwargs: (args, kwargs))

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function.

        Args:
            *args: Its positional arguments.
            **kwargs: Its keyword arguments.

        Returns:
            What the function returns, in the form of ``out``.

        Raises:
            ArgumentError: An argument is not an array, or does not fit its declaration.
            SpecError: ``dynamic_axes`` does not fit the arguments.
            SizeMismatchError: The sizes of the arguments contradict each other.
            BucketOverflowError: A size is beyond the largest bucket, and its policy is to raise.
            FallbackError: The call cannot be masked, and ``fallback`` is to raise.
            CompileBudgetError: A compile is needed that the budget does not allow.
            ShapeCheckError: At these sizes an array cannot be reshaped as the function does.
            MaskingError: ``check`` found that results differ.
        """
        try:
            # Inside a transformation (jit, vmap, grad) there is nothing to pad.
            if THREAD_TRACE.value not in NO_TRACE:
                return self._inside(args, kwargs)
            failed = None
            path = self._fast_path
            for is_by_tree in path.looks:
                for table in path.alike(args, kwargs) if is_by_tree else path.latest:
                    try:
                        handlers = table.by_key.get(table.key(args, kwargs), ())
                    except TypeError:  # a static argument that cannot be hashed
                        break
                    for handler in handlers:
                        try:
                            return handler.serve(args, kwargs)
                        except (SignatureChanged, NotPlaced):  # nothing has run: try the next one
                            continue
                        except Evicted:
                            break
                        except Exception as error:
                            failed = error
                            break
                if failed is not None:
                    break
            return self._serve_slowly(args, kwargs, failed)
        except Exception as error:
            failed = None  # its traceback may refer to this frame
            with suppress(Exception):  # as near the limit of recursion, or of a class with no notes
                shortened(error)
                named = (self._engine.signer.name(i) for i in range(len(args)))
                note_arguments(error, {**dict(zip(named, args, strict=False)), **kwargs})
            raise

    def _serve_slowly(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], failed: Exception | None
    ) -> Any:
        """Serve a call that no handler knows, or whose handler has failed."""
        engine = self._engine
        if failed is not None:
            try:
                # The function was given wrong arguments, say: signing may raise a better error.
                # A `Padded` argument may fail in a handler and be served here.
                call = engine.signer.sign(args, kwargs)
                is_dropped = isinstance(failed, NothingSelected)
                if is_dropped or any(isinstance(x, Padded) for x in call.leaves):
                    return engine.serve(call)
                raise failed
            finally:
                failed = None  # its traceback refers to this frame
        if jit_disabled() or self._plain is not None:
            return self._inside(args, kwargs)
        if self._of_copies is not None:
            args, kwargs = engine.signer.changed(copied, args, kwargs)
            return self._of_copies(*args, **kwargs)
        if engine.together is not None and engine.together.is_active:
            return engine.together.serve(engine, (args, kwargs))
        handler = None
        if engine.preparer is None:
            handler = engine.memory.at_new_sizes((args, kwargs), engine.served)
        if handler is not None:
            try:
                return handler.serve(args, kwargs)
            except (SignatureChanged, NotPlaced, Evicted, NothingSelected):  # nothing that counts
                pass
        return engine.serve(engine.signer.sign(args, kwargs), (args, kwargs))
