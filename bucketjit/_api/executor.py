"""`BucketedExec`, the callable that users make from a function, and `jit`, its decorator.

Its ``with_...`` methods and its other methods are in the files beside this one, by topic, and the
call path is in `bucketjit._runtime.call_path`. Here are its options, and calls inside of
transformations.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Self, Unpack, overload

import jax

from bucketjit._api.bound import Bindable
from bucketjit._api.options import Options, config_of, configured, global_name, options_of
from bucketjit._api.staging import Staging
from bucketjit._arrays.padding import copied, without_padding
from bucketjit._arrays.results import as_numpy, as_padded
from bucketjit._config import Config, Out
from bucketjit._environment import DISABLED, is_disabled, log_as_asked
from bucketjit._jax.config import jit_disabled, only_differentiated
from bucketjit._runtime.call_path import P, R
from bucketjit._runtime.counters import CallCounter, Counters
from bucketjit._runtime.derivatives import Derivatives, Inlined, nested, note_inlined
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.engine_parts import SharedState
from bucketjit._runtime.fast_path.dispatch import FastPath
from bucketjit._tracing.signer import Signer


def plain_jit(config: Config, signer: Signer, counters: Counters) -> Callable[..., Any]:
    """The function under ``jax.jit``."""
    donated = sorted(signer.parameters.donated)
    options = dict(config.compiler_options) or None
    placed = config.shardings
    jitted = nested(config.fn, signer, donate_argnums=donated, compiler_options=options, **placed)

    def call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if config.copy_inputs:
            args, kwargs = signer.changed(copied, args, kwargs)
        args, kwargs = without_padding((args, dict(kwargs)))
        result = config.fn(*args, **kwargs) if jit_disabled() else jitted(args, kwargs)
        counters.call(CallCounter({}, reason=DISABLED.reason))
        if config.out is Out.JAX:
            return result
        return jax.tree_util.tree_map(as_numpy if config.out is Out.NUMPY else as_padded, result)

    return call


class BucketedExec(Staging[P, R], Bindable[P, R]):
    """A function compiled once per bucket of sizes, with the results of the unpadded one.

    The function is traced once with symbolic sizes. Each call rounds its sizes up to a bucket,
    pads the arguments, and runs the bucket's executable, in which padding is masked out. The
    masks are derived from the traced program, so the function needs none. A call that cannot
    be masked runs at its exact shape and says why (see `Fallback`).

    Without a strategy every size gets its own executable; add one with `with_pow2` and the
    like. Bucketed functions are immutable: every ``with_...`` returns a new one with an empty
    cache. Calling one from several threads is safe. Called inside ``jax.jit``, ``jax.vmap`` and the
    like the function itself is inlined, which is warned of once; its derivatives by ``jax.grad``
    and ``jax.jvp`` are bucketed.

    Two environment variables are read when a bucketed function is made: ``BUCKETJIT_DISABLE=1``
    makes it plain ``jax.jit``, and ``BUCKETJIT_LOG=compiles``, ``fallbacks`` or ``all`` prints its
    events to standard error.

    Args:
        fn: A function that ``jax.jit`` accepts.
        dynamic_axes: Which axes are open. One entry per positional argument: a string as in
            ``jax.export`` (``"b, s, _"``, ``"b, ..."``), ``None`` (static), a dict
            ``{0: "b"}``, a tuple ``("b", None)``, a list of axes ``[0, 1]``, or a pytree
            (prefix) of these for containers; or a dict of entries by argument name. One name
            is one size. A Python int argument with entry ``"n"`` is a size itself. By default
            axis 0 of every argument that is an array, called ``batch``, and of the arrays of a
            container whose arrays all have one size there, such as a batch in a dict. What else
            is in containers is static until it varies.
        buckets: The buckets of all variables, or a dict of them by variable: ``"pow2"``,
            ``"exact"``, a list of sizes, or a strategy. The ``with_...`` methods are the same. By
            default every size gets an executable of its own.
        overflow: What happens to sizes beyond the largest bucket, or a dict of that by variable:
            ``"error"``, ``"extend"`` or ``"exact"``; see `Overflow`.
        constraints: Conditions that the sizes of every call satisfy, as in ``jax.export``:
            ``"s >= 4"``, ``"mod(s, 2) == 0"``.
        static_argnums: Positions of arguments that are compile-time constants, as in ``jit``.
        static_argnames: Names of such arguments.
        donate_argnums: Positions of arguments whose buffers may be reused, as in ``jit``.
            Of an argument that is padded the copy is donated. If a result takes its memory, the
            argument is deleted, as one that needs no padding is; if none can, JAX warns.
        donate_argnames: Names of such arguments; they are donated if they are passed by position.
        fallback: What to do with calls that cannot be masked: ``"exact"`` runs them at their exact
            shape, ``"error"`` raises; see `Fallback`.
        check: Checked execution, for tests: ``"off"``, ``"poison"``, ``"exact"`` or
            ``"exact always"``; see `Check`.
        out: The form of results: ``"jax"`` for arrays of logical shape, ``"numpy"`` for host
            arrays, ``"padded"`` for `Padded` ones, which another bucketed function takes without
            cutting and padding them again.
        copy_inputs: Whether NumPy arguments are copied before the call, so that they may be
            overwritten as soon as it returns. Without it, as in ``jit``, one that fits its bucket,
            or has no open axes, may be read after the call has returned: wait for the result
            before you write to it.
        maxsize: How many executables to keep; None for no bound. See `with_maxsize`.
        compile_budget: How much may be compiled: a number of compiles, or a `CompileBudget`.
        compiler_options: Options of XLA by name, as in ``jit``, for everything that is compiled.
            For a call inside another ``jit``, the options of that ``jit`` hold.
        warn_after: How many executables calls compile before a `RecompileWarning` tells which axis
            varied. By default 18 above the number of buckets; without any strategy two sizes; none
            where you chose one compile per size (`with_exact`). 0 for no warning.
        in_shardings: Where arguments are put, as in ``jit``: a tree, or a prefix of one, of
            shardings, partition specs (under ``jax.set_mesh``) and None. Each bucket is a multiple
            of the parts into which a mesh cuts it, so calls of any size are put on the mesh.
        out_shardings: Where results are, likewise. A result that is cut to a size that the mesh
            does not divide is whole along that axis; ``out="padded"`` leaves it cut.

    Raises:
        TypeError: ``fn`` is not callable.
        SpecError: An option is malformed.
        StrategyContractError: A strategy in ``buckets`` has no ``bucket`` method.

    Examples:
        >>> import jax.numpy as jnp, numpy as np
        >>> mean = BucketedExec(lambda x: jnp.mean(x, axis=0)).with_pow2()
        >>> [float(mean(np.arange(n, dtype=np.float32))) for n in (3, 5, 7)]
        [1.0, 2.0, 3.0]
        >>> mean.cache_size()  # the buckets 4 and 8
        2

        A buffer that is filled anew for each call, before the last result is waited for:

        >>> total = BucketedExec(jnp.sum, copy_inputs=True).with_pow2()
        >>> buffer, totals = np.empty(4, np.float32), []
        >>> for value in (1, 2):
        ...     buffer[:] = value
        ...     totals.append(total(buffer))
        >>> [float(x) for x in totals]
        [4.0, 8.0]
    """

    def __init__(self, fn: Callable[P, R], **options: Unpack[Options]) -> None:
        self._setup(config_of(fn, options))

    def _setup(self, config: Config, shared: SharedState | None = None) -> None:
        log_as_asked()
        self._config = config
        if config.sharded is None and config.agreed is None:
            self._engine = Engine(config, shared)
        else:
            from bucketjit._processes.together import engine_of

            self._engine = engine_of(config, shared)
        if is_disabled():
            self._plain = plain_jit(config, self._engine.signer, self._engine.counters)
        self._fast_path = self._engine.memory.fast_path
        if config.ahead is not None:
            from bucketjit._stages.ahead import Ahead

            self._engine.preparer = Ahead(config.ahead)
        make: Callable[[Config], Any] = functools.partial(self._of, shared=self._engine.shared)
        self._derivatives = Derivatives(self._engine, make)
        # `updated=()`: do not copy `fn.__dict__`. An attribute of a callable object could have the
        # name of an attribute of this object.
        functools.update_wrapper(self, config.fn, updated=())
        self._inlined: Callable[..., Any] | None = None
        self._of_copies: Callable[..., Any] | None = None
        if config.copy_inputs:
            # A twin without this option serves the calls. This object has an empty fast path, so
            # its calls reach the line that copies the arguments and calls the twin. Other bucketed
            # functions need not check for the option on their fast path.
            twin = object.__new__(type(self))
            vars(twin).update(vars(self))
            self._of_copies, self._fast_path = twin, FastPath()

    @classmethod
    def _of(cls, config: Config, shared: SharedState | None = None) -> Self:
        new = object.__new__(cls)
        new._setup(config, shared)
        return new

    def _with(self, **changes: Any) -> Self:
        return self._of(dataclasses.replace(self._config, **changes))

    @classmethod
    def _unpickled(cls, fn: Callable[..., Any], *options: Any) -> Self:
        return cls._of(configured(fn, *options))

    def __reduce__(self) -> Any:
        config = self._config
        return global_name(self) or (self._unpickled, (config.fn, *options_of(config)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._with(fn=copy.deepcopy(self._config.fn, memo))

    # --- calls inside transformations ---

    def _inside(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call inside a transformation: the function itself, or a derivative in buckets."""
        if self._config.sharded is not None:
            from bucketjit._processes.together import refuse_on_shards

            refuse_on_shards(self._config, "a call inside jax.jit, grad or vmap, or without jit,")
        if self._plain is not None:
            return self._plain(args, kwargs)
        engine = self._engine
        if self._config.copy_inputs:
            args, kwargs = engine.signer.changed(copied, args, kwargs)
        args, kwargs = without_padding((args, dict(kwargs)))
        if jit_disabled():
            return self._config.fn(*args, **kwargs)
        if only_differentiated() and not engine.config.always_exact:
            differentiated = self._derivatives.of(args, kwargs)
            if differentiated is not None:
                return differentiated()
        note_inlined(engine.config, engine.name, engine.counters)
        if self._inlined is None:
            placed = engine.config.shardings
            self._inlined = Inlined(engine.config.fn, engine.name, engine.signer, **placed)
        return self._inlined(args, kwargs)

    def cache_clear(self) -> None:
        """Drop every executable and program, and reset the counters."""
        self._derivatives.clear()
        super().cache_clear()


@overload
def jit(fn: Callable[P, R], **options: Unpack[Options]) -> BucketedExec[P, R]: ...


@overload
def jit(
    fn: None = None, **options: Unpack[Options]
) -> Callable[[Callable[P, R]], BucketedExec[P, R]]: ...


def jit(fn: Callable[..., Any] | None = None, **options: Unpack[Options]) -> Any:
    """Compile a function once per bucket of sizes; `BucketedExec` as a decorator.

    The parameters are those of `BucketedExec`, which describes them; only the default of
    ``buckets`` differs. Those that ``jax.jit`` has too have the same names. The function may be a
    method: then ``self`` is the first argument, a pytree, or static by ``static_argnums=0``.

    Args:
        fn: The function. Left out if the decorator has options: ``@jit(buckets=...)``.
        dynamic_axes: Which axes are open.
        buckets: ``"auto"`` (the default), which learns them from the calls; ``"pow2"``,
            ``"exact"``, a list of sizes, or a strategy; or one of these by the name of a dimension
            variable.
        overflow: What to do with sizes beyond the largest bucket, or a dict of that by the name of
            a dimension variable.
        constraints: Conditions that the sizes of every call satisfy.
        static_argnums: Positions of arguments that are compile-time constants.
        static_argnames: Names of such arguments.
        donate_argnums: Positions of arguments whose buffers may be reused.
        donate_argnames: Names of such arguments; they are donated if passed by position.
        fallback: What to do with calls that cannot be masked.
        check: Checked execution, for tests.
        out: The form of results: ``"jax"``, ``"numpy"`` or ``"padded"``.
        copy_inputs: Whether NumPy arguments are copied, so that they may be overwritten as soon as
            the call returns.
        maxsize: How many executables to keep; None for no bound.
        compile_budget: How much may be compiled, see `CompileBudget`.
        compiler_options: Options of XLA by name.
        warn_after: How many executables calls compile before a warning tells which axis varied.
        in_shardings: Where arguments are put.
        out_shardings: Where results are.

    Returns:
        The bucketed function, or a decorator that makes it.

    Raises:
        SpecError, StrategyContractError, TypeError, ValueError: What `BucketedExec` raises.

    Examples:
        >>> import bucketjit, jax.numpy as jnp, numpy as np
        >>> @bucketjit.jit(buckets=[4, 16], dynamic_axes="n")
        ... def spread(x):
        ...     '''Largest minus smallest.'''
        ...     return x.max() - x.min()
        >>> float(spread(np.arange(3.0))), float(spread(np.arange(9.0)))
        (2.0, 8.0)
        >>> spread.cache_size(), spread.__doc__
        (2, 'Largest minus smallest.')
    """
    options.setdefault("buckets", "auto")
    if fn is None:
        return functools.partial(BucketedExec, **options)
    return BucketedExec(fn, **options)
