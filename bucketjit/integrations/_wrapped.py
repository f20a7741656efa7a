"""What the wrappers of this package share: they hand plain arguments to bucketed functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Self

from bucketjit._api.bound import Bindable
from bucketjit._api.executor import BucketedExec
from bucketjit._api.options import configured, global_name, options_of
from bucketjit._runtime.call_path import P, R
from bucketjit._stages.explain import asked
from bucketjit.types import Explanation, Report, Stats, WarmupReport

# Methods of a bucketed function that take no arguments of the function, and change no option.
_SAME = (
    "cache_clear",
    "cache_info",
    "cache_size",
    "forbid_compiles",
    "pin",
    "plot",
    "reset_stats",
    "wait_for_compiles",
)

_WRITES = ("save", "export_dynamic", "export_bounded")  # no file has the objects of a library


class Wrapped(Bindable[P, R]):
    """A function of a library's objects, which a bucketed function runs on their arrays.

    Args:
        fn: The function of the user.
        executor: Runs it on plain arguments.
        out: The form of its results.
        is_quiet: Whether JAX's warning of donated arguments is dropped.

    Attributes:
        executor: The executor. It takes arguments and returns results as this package hands them
            over, so call the wrapper, and ask the bucketed function.
    """

    _plain: Any  # the method that makes the arguments of the bucketed function
    _of_arrays: Any  # makes the function of these arguments of the user's

    def __init__(
        self,
        fn: Callable[..., Any],
        executor: BucketedExec[..., Any],
        out: str = "jax",
        is_quiet: bool = False,
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.executor: BucketedExec[..., Any] = executor
        self._out, self._is_quiet = out, is_quiet

    def __reduce__(self) -> Any:
        parts = self.__wrapped__, self._out, self._is_quiet, *options_of(self.executor._config)
        return global_name(self) or (self._unpickled, parts)

    @classmethod
    def _unpickled(cls, fn: Any, out: str, is_quiet: bool, *options: Any) -> Self:
        config = configured(cls._of_arrays(fn), *options)
        return cls(fn, BucketedExec._of(config), out, is_quiet)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} of {self.executor!r}>"

    def __dir__(self) -> list[str]:
        builders = [name for name in dir(BucketedExec) if name.startswith("with_")]
        return sorted({*super().__dir__(), *_SAME, *builders})

    def __getattr__(self, name: str) -> Any:
        """A method of the bucketed function: one that asks of it, or a ``with_...`` method."""
        if name in _SAME:
            return getattr(self.executor, name)
        if not name.startswith("with_") or not hasattr(BucketedExec, name):
            wanted = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _WRITES:
                wanted += (
                    ": no file holds modules. Make them a part of a function whose arguments are "
                    f"arrays: bucketjit.jit(lambda x: fn.__wrapped__(model, x)).{name}(...)"
                )
            elif not name.startswith("_") and hasattr(BucketedExec, name):
                wanted += f"; its executor has: .executor.{name}"
            raise AttributeError(wanted)
        build = getattr(self.executor, name)

        @functools.wraps(build)
        def builder(*args: Any, **kwargs: Any) -> Any:
            executor = build(*args, **kwargs)
            return type(self)(self.__wrapped__, executor, self._out, self._is_quiet)

        return builder

    def stats(self) -> Stats:
        """A snapshot of what the bucketed function has done; see `BucketedExec.stats`."""
        return self.executor.stats()

    def report(self) -> Report:
        """The counters as tables; see `BucketedExec.report`."""
        return self.executor.report()

    def explain(self, *args: Any, rules: bool | None = None, **kwargs: Any) -> Explanation:
        """Explain what a call with these arguments would do; see `BucketedExec.explain`.

        Args:
            *args: The positional arguments of the call.
            rules: Whether the text lists the program and what is masked.
            **kwargs: Its keyword arguments.
        """
        rules, kwargs = asked(self.executor._engine.signer, rules, kwargs)
        args, kwargs = self._plain(args, kwargs)
        return self.executor.explain(*args, **{"rules": rules, **kwargs})

    def warmup(self, *args: Any, **kwargs: Any) -> WarmupReport:
        """Compile buckets before calls need them; see `BucketedExec.warmup`.

        Args:
            *args: Arguments like those of the calls.
            **kwargs: Keyword arguments like those of the calls, and the options of
                `BucketedExec.warmup`, such as ``sizes``.
        """
        parameters = inspect.signature(self.executor.warmup).parameters.values()
        named = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        options = {name: value for name, value in kwargs.items() if name in named}
        rest = {name: value for name, value in kwargs.items() if name not in named}
        args, rest = self._plain(args, rest)
        return self.executor.warmup(*args, **options, **rest)
