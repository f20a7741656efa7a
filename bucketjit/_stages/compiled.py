"""`Compiled`: one executable, called by itself, for every logical size of its bucket."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from bucketjit._compile.executable import Executable
from bucketjit._jax.compiler import as_stage
from bucketjit._jax.tracebacks import boundary
from bucketjit._ragged.examples import examples_of
from bucketjit._ragged.map import map_examples
from bucketjit._ragged.options import options_of
from bucketjit._runtime.call_path import CallPath
from bucketjit._stages.one_bucket import OneBucket, engine_of
from bucketjit._stages.stage import Stage, StageTypes
from bucketjit._stages.subject import Subject


class Compiled(CallPath[..., Any], Stage):
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
        copies: bool = False,
    ) -> None:
        Stage.__init__(self, subject, types)
        self._stage = as_stage(entry.compiled, lowered)
        self._one = OneBucket(subject)
        self._engine = engine_of(self._one, entry)
        self._fast_path = self._engine.memory.fast_path
        # It copies the arguments, and has an empty fast path, so that all its calls do so.
        self._of_copies = Compiled(subject, types, entry, lowered) if copies else None

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
        return super().__call__(*args, **kwargs)

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
        options = options_of(self._engine.config.out, reduce, None, None)
        examples = examples_of(self._engine.signer, args, kwargs, in_axes)
        return map_examples(self._engine, examples, options, lambda own, named: self(*own, **named))

    def _inside(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call inside a transformation: checked here, made by the bucketed function."""
        signed = self._engine.signer.sign(args, kwargs)
        is_known = all(type(n) is int for shape in signed.shapes for n in shape)
        if not self.exact and is_known:  # `jax.export` has symbolic sizes
            self._one.check(signed.signature.open_axes(self._subject.call, signed.shapes)[1])
        statics, rest = self._subject.signed.statics, iter(args)
        count = len(args) + len(statics.positional)
        merged = tuple(
            statics.positional[i] if i in statics.positional else next(rest) for i in range(count)
        )
        return self._subject.inside(merged, {**kwargs, **statics.keyword})

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
