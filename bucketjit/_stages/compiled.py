"""`Compiled`: one executable, called by itself, for every logical size of its bucket."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from bucketjit._arrays.padded import Padded
from bucketjit._arrays.padding import copied, plain
from bucketjit._compile.cache import ExecutableCache
from bucketjit._compile.computed_results import SizesDiffer
from bucketjit._compile.executable import Executable, SignatureChanged
from bucketjit._config import Check
from bucketjit._jax.arrays import NotPlaced
from bucketjit._jax.compiler import as_stage
from bucketjit._jax.config import jit_disabled
from bucketjit._jax.tracebacks import boundary, shortened
from bucketjit._jax.transformations import NO_TRACE, THREAD_TRACE
from bucketjit._ragged.examples import examples_of
from bucketjit._ragged.map import map_examples, options_of
from bucketjit._runtime.call_counts import CallCounter
from bucketjit._runtime.fast_path.dispatch import CallArguments
from bucketjit._runtime.fast_path.memory import RememberedCalls, ServedCall
from bucketjit._runtime.runs import counted, counter_of, exact_finisher
from bucketjit._signature.signer import SignedCall
from bucketjit._stages.arguments import Arguments
from bucketjit._stages.stage import Stage, StageTypes
from bucketjit._stages.subject import Subject

_THREAD_TRACE, _NO_TRACE = THREAD_TRACE, NO_TRACE


class Compiled(Stage):
    """An executable that serves every logical size of one bucket; see ``jax.stages.Compiled``.

    ``Lowered.compile`` makes it. Call it like the bucketed function, without static arguments: they
    are part of it. Each argument is checked, also one that the function does not read, and so are
    the sizes. It holds its executable, whatever the cache of the bucketed function does. Inside
    ``jax.grad``, ``jax.jit``, ``jax.vmap`` and the like it does what the bucketed function does
    there, after the same check.

    Argument 0 of the module that was compiled is the int32 vector of the sizes, in the order of
    `variables`; see `Lowered`.
    """

    def __init__(
        self,
        subject: Subject,
        types: StageTypes,
        entry: Executable,
        lowered: jax.stages.Lowered,
        key: Any,
    ) -> None:
        super().__init__(subject, types)
        engine = subject.engine
        self._entry = entry
        self._key = key
        self._stage = as_stage(entry.compiled, lowered)
        self._arguments = Arguments(subject)
        self._copies = engine.config.copy_inputs
        # A cache of its own, so that the executable stays when it leaves that of the bucketed
        # function.
        cache: ExecutableCache[Any, Executable] = ExecutableCache(None)
        cache.get_or_compile(key, lambda: entry)
        self._memory = RememberedCalls(cache, engine.counters, threading.RLock())
        self._fast_path = self._memory.fast_path
        with engine.lock:
            engine.memories_apart.add(self._memory)

    # --- the call path, as in `BucketedExec` ---

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the function.

        Args:
            *args: Its positional arguments, without static ones.
            **kwargs: Its keyword arguments, likewise.

        Returns:
            What the bucketed function would return.

        Raises:
            ArgumentError: An argument differs from what was compiled for, or a size is beyond the
                bucket or needs another program. The same for a size that the program computes.
            SizeMismatchError: The sizes of the arguments contradict each other.
            ShapeCheckError: At these sizes an array cannot be reshaped as the function does.
            MaskingError: ``check`` found that results differ.

        Examples:
            >>> import jax.numpy as jnp, numpy as np
            >>> from bucketjit import BucketedExec
            >>> mean = BucketedExec(jnp.mean, dynamic_axes="n").with_pow2()
            >>> compiled = mean.lower(np.ones(5, np.float32)).compile()
            >>> [float(compiled(np.arange(n, dtype=np.float32))) for n in (1, 3, 8)]
            [0.0, 1.0, 3.5]
            >>> compiled(np.ones(9, np.float32))
            Traceback (most recent call last):
                ...
            bucketjit.errors.ArgumentError: a: compiled for float32[n] with n at most 8, called ...
        """
        try:
            if _THREAD_TRACE.value not in _NO_TRACE:
                return self._inside(args, kwargs)
            if self._copies:
                args, kwargs = jax.tree_util.tree_map(copied, (args, kwargs))
            failed = None
            for table in self._fast_path.tables:
                for handler in table.by_key.get(table.key(args, kwargs), ()):
                    try:
                        return handler.serve(args, kwargs)
                    # Nothing has run, or its results are dropped: try the next handler.
                    except (SignatureChanged, NotPlaced, SizesDiffer):
                        continue
                    except Exception as error:
                        failed = error
                        break
                if failed is not None:
                    break
            return self._serve(args, kwargs, failed)
        except Exception as error:
            failed = None  # its traceback may refer to this frame
            shortened(error)
            raise

    @boundary
    def map(self, *args: Any, in_axes: Any = None, reduce: str | None = None, **kwargs: Any) -> Any:
        """Call it for many examples, one after the other: it is compiled for one at a time.

        Args:
            *args: The positional arguments, without static ones; those that differ between examples
                are lists of them, as in `BucketedExec.map`.
            in_axes: Which arguments are lists: 0, or None for a shared one, for each of ``args``.
            reduce: ``"sum"`` or ``"mean"`` for that of all results.
            **kwargs: The keyword arguments, likewise.

        Returns:
            A list of the results, or one reduced result.

        Raises:
            ArgumentError, SpecError: As by `BucketedExec.map`, and by a call.

        Examples:
            >>> import jax.numpy as jnp, numpy as np
            >>> from bucketjit import BucketedExec
            >>> total = BucketedExec(jnp.sum, dynamic_axes="n").with_pow2()
            >>> compiled = total.lower(np.ones(5, np.float32)).compile()
            >>> [float(x) for x in compiled.map([np.ones(n, np.float32) for n in (1, 3, 8)])]
            [1.0, 3.0, 8.0]
        """
        engine = self._subject.engine
        signer, statics = engine.signer, self._subject.signed.statics
        if isinstance(in_axes, tuple | list):
            rest = iter(in_axes)
            count = len(in_axes) + len(statics.positional)
            in_axes = [None if i in statics.positional else next(rest) for i in range(count)]
        options = options_of(engine.config.out, reduce, None, None)
        examples = examples_of(signer, *self._arguments.with_statics(args, kwargs), in_axes)

        def call(given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            own = [x for i, x in enumerate(given) if i not in statics.positional]
            return self(*own, **{k: v for k, v in named.items() if k not in statics.keyword})

        return map_examples(engine, examples, options, call)

    def _inside(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call inside a transformation: checked here, made by the bucketed function."""
        signed = self._arguments.sign(args, kwargs)
        is_known = all(type(n) is int for shape in signed.shapes for n in shape)
        if not self.exact and is_known:  # `jax.export` has symbolic sizes
            self._arguments.sizes(signed)
        return self._subject.inside(*self._arguments.with_statics(args, kwargs))

    def _serve(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], failed: Exception | None
    ) -> Any:
        """The slow path: check the arguments, run, and remember the call for the fast path.

        Of wrong arguments the check says more than the handler that has ``failed``. A `Padded`
        argument may fail in a handler and be served here.
        """
        if jit_disabled() and failed is None:
            return self._inside(args, kwargs)
        signed = self._arguments.sign(args, kwargs)
        if failed is not None and not any(isinstance(x, Padded) for x in signed.leaves):
            try:
                raise failed
            finally:
                failed = None  # its traceback refers to this frame
        given = CallArguments(args, kwargs)
        try:
            if self.exact:
                return self._run_exact(signed, given)
            return self._run_masked(signed, given)
        except SignatureChanged:
            raise self._arguments.changed_otherwise() from None
        except SizesDiffer as differ:
            raise self._arguments.other_computed_sizes(differ.computed) from None

    def _run_masked(self, signed: SignedCall, given: CallArguments) -> Any:
        engine, entry = self._subject.engine, self._entry
        out = engine.config.out
        call = self._arguments.resolve(signed)
        sizes = entry.sizes_for(call)
        line = counter_of(entry, call, signed)
        served = ServedCall(self._key, sizes, entry.finisher(call, out, engine.counters), line)
        result = engine.run(entry, signed, call, served, out)
        if engine.config.check is Check.OFF:
            self._memory.add_masked(signed, given, call, served)
        return result

    def _run_exact(self, signed: SignedCall, given: CallArguments) -> Any:
        engine, entry = self._subject.engine, self._entry
        args, kwargs = signed.tree.unflatten(map(plain, signed.leaves))
        program = self._subject.call.program
        finish = exact_finisher(entry, signed, program, engine.config.out)
        line = CallCounter(self.bucket, key=signed.shape_key)
        with counted(engine.counters, line):
            result = entry.run(None, args, kwargs)
            result = result if finish is None else finish(result)
        if engine.config.check is Check.OFF:
            specs = signed.signature.specs
            # Without open axes, the shape of the first leaf is what calls are found by.
            opened = [i for i, spec in enumerate(specs) if spec is not None] or [0][: len(specs)]
            self._memory.add(signed, given, opened, ServedCall(self._key, None, finish, line))
        return result

    # --- what JAX tells of it ---

    def as_text(self) -> str | None:
        """The optimised module, to read; None if the backend does not tell."""
        return self._stage.as_text()

    def cost_analysis(self) -> Any:
        """XLA's estimate of what a call costs, such as ``"flops"``, padding included.

        Returns:
            A dict, on most backends; None if the backend does not tell.
        """
        return self._stage.cost_analysis()

    def memory_analysis(self) -> Any:
        """XLA's estimate of the memory that a call takes; None if the backend does not tell."""
        return self._stage.memory_analysis()

    def runtime_executable(self) -> Any:
        """The executable of XLA behind it, for debugging; its interface is that of jaxlib."""
        return self._stage.runtime_executable()

    @property
    def input_shardings(self) -> Any:
        """Tree of the sharding of each padded argument; None for one that is not read."""
        return self._of_arguments(self._stage.input_shardings)

    @property
    def output_shardings(self) -> Any:
        """Tree of the sharding of each padded result."""
        return self._of_results(self._stage.output_shardings)

    @property
    def input_formats(self) -> Any:
        """Tree of the layout and sharding of each padded argument."""
        return self._of_arguments(self._stage.input_formats)

    @property
    def output_formats(self) -> Any:
        """Tree of the layout and sharding of each padded result."""
        return self._of_results(self._stage.output_formats)

    def _of_arguments(self, tree: Any) -> Any:
        """Without what belongs to the sizes, which are argument 0 of the module."""
        args, kwargs = tree
        return (args if self.exact else args[1:]), kwargs

    def _of_results(self, tree: Any) -> Any:
        of: PyTreeDef = self.out_tree
        leaves = jax.tree_util.tree_leaves(tree, is_leaf=lambda x: x is None)
        return of.unflatten(leaves[: of.num_leaves])  # counts of computed sizes may follow
