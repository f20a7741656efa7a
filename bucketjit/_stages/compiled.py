"""`Compiled`: one executable, called by itself, for every logical size of its bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from bucketjit._compile.executable import Executable
from bucketjit._compile.requests import Requests
from bucketjit._config import Fallback
from bucketjit._events import shown
from bucketjit._ir.dynamic_axes import Tokens
from bucketjit._ir.expressions import evaluate_text, variables_of
from bucketjit._ir.guards import parse_constraint
from bucketjit._ir.interface import Interface
from bucketjit._jax.compiler import as_stage
from bucketjit._jax.config import trace_context
from bucketjit._jax.tracebacks import boundary
from bucketjit._runtime.buckets import ChoosesBuckets
from bucketjit._runtime.call_path import CallPath
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.engine_parts import Parts, SharedState
from bucketjit._runtime.rows.examples import examples_of
from bucketjit._runtime.rows.map import map_examples, options_of
from bucketjit._stages.stage import Stage, StageTypes, Subject
from bucketjit._tracing.axis_guesses import Shapes
from bucketjit._tracing.call import Call
from bucketjit._tracing.made_for import MadeFor, fixed_signature, in_words
from bucketjit._tracing.parameters import Key
from bucketjit._tracing.resolution import Resolution, bind_sizes, open_shapes
from bucketjit._tracing.signature import Signature
from bucketjit._tracing.signer import Signer
from bucketjit.errors import ArgumentError


class Compiled(CallPath[..., Any], Stage):
    """An executable that serves every logical size of one bucket; see ``jax.stages.Compiled``.

    ``Lowered.compile`` makes it. Call it like the bucketed function, without static arguments: they
    are part of it. Each argument is checked, also one that the function does not read, and so are
    the sizes. It holds its executable, whatever the cache of the bucketed function does. Inside
    ``jax.grad``, ``jax.jit``, ``jax.vmap`` and the like it does what the bucketed function does
    there, after the same check.

    A call raises `ArgumentError` for an argument that differs from what was compiled for, and for a
    size that is beyond the bucket or needs another program, one that the program computes included.

    Argument 0 of the module that was compiled is the int32 vector of the sizes, in the order of
    `variables`; see `Lowered`.

    Examples:
        >>> import jax.numpy as jnp, numpy as np
        >>> import bucketjit
        >>> mean = bucketjit.jit(jnp.mean, dynamic_axes="n", buckets="pow2")
        >>> compiled = mean.lower(np.ones(5, np.float32)).compile()
        >>> [float(compiled(np.arange(n, dtype=np.float32))) for n in (1, 3, 8)]
        [0.0, 1.0, 3.5]
        >>> compiled(np.ones(9, np.float32))
        Traceback (most recent call last):
            ...
        bucketjit.errors.ArgumentError: a: compiled for float32[n] with n at most 8, called ...
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
        self._holder = OneBucket(subject)
        self._engine = self._holder.engine(entry)
        self._fast_path = self._engine.memory.fast_path
        # It copies the arguments, and has an empty fast path, so that all its calls do so.
        self._of_copies = Compiled(subject, types, entry, lowered) if copies else None

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
            >>> import bucketjit
            >>> total = bucketjit.jit(jnp.sum, dynamic_axes="n", buckets="pow2")
            >>> compiled = total.lower(np.ones(5, np.float32)).compile()
            >>> [float(x) for x in compiled.map([np.ones(n, np.float32) for n in (1, 3, 8)])]
            [1.0, 3.0, 8.0]
        """
        options = options_of(self._engine.config.out, reduce, None, None)
        examples = examples_of(self._engine.signer, args, kwargs, in_axes)
        return map_examples(self._engine, examples, options, lambda xs, named: self(*xs, **named))

    def _inside(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call inside a transformation: checked here, made by the bucketed function."""
        call = self._engine.signer.sign(args, kwargs)
        is_known = all(type(n) is int for shape in call.shapes for n in shape)
        if not self.exact and is_known:  # `jax.export` has symbolic sizes
            sizes = call.signature.open_axes(self._subject.call, call.shapes)[1]
            call.signature.check_constraints(sizes)
            self._holder.check(sizes)
        statics, rest = self._subject.call.statics, iter(args)
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
        leaves = jax.tree_util.tree_leaves(tree, is_leaf=lambda x: x is None)
        of = self.out_tree
        return of.unflatten(leaves[: of.num_leaves])  # counts of computed sizes may follow


def _context() -> Any:
    with jax.disable_jit(False):  # as in JAX, the stages do not depend on it
        return trace_context()


class OneBucket(ChoosesBuckets):
    """What calls of one executable may have: types, programs, sizes."""

    def __init__(self, subject: Subject) -> None:
        call, name = subject.call, subject.engine.signer.name
        self.subject = subject
        self._context = _context()
        tokens: Tokens = subject.call.tokens
        if subject.exact:
            tokens = tuple(("_",) * len(shape) for shape in call.shapes)
        statics = call.statics
        self.arguments = MadeFor(
            "compiled for",
            call.tree,
            call.signature.types,
            open_shapes(tokens, call.shapes),
            subject.name_of,
            ({name(i): value for i, value in statics.positional.items()}, statics.keyword),
            call.leaves,
        )

    def engine(self, entry: Executable) -> Engine:
        """An engine that serves calls by an executable, whatever becomes of any other cache."""
        subject = self.subject
        parent, call = subject.engine, subject.call
        config = dataclasses.replace(
            parent.config,
            fn=call.signature.fn,
            static_argnums=(),
            static_argnames=(),
            donate_argnums=(),
            copy_inputs=False,
            fallback=Fallback.ERROR,
            maxsize=None,
            max_bytes=None,
            background=None,
        )
        signature = self.signature()
        signature.target = call.signature.target

        def signature_of(key: Key) -> Signature:
            if _context() != self._context:
                raise ArgumentError(
                    "the configuration of JAX (jax_enable_x64, matmul precision, a mesh) differs "
                    "from that at lowering; call it under the same configuration, or lower it again"
                )
            return signature

        parts = Parts(
            signer=lambda config: Signer(config, self.arguments, signature_of),
            buckets=lambda config, lock, requests: self,
            lock=lambda: parent.lock,
        )
        engine = Engine(config, SharedState(config, parent.name, parent.counters), parts)
        if subject.exact:
            key: Any = signature, tuple(call.shapes)
        else:
            key = Requests.masked_key(subject.program, subject.bucket)
        engine.cache.get_or_compile(key, lambda: entry)
        if config.sharded is not None:  # its rows are given to the shards, as by the parent
            engine.together = parent.together
        with parent.lock:
            parent.memories_apart.add(engine.memory)
        return engine

    def signature(self) -> Signature:
        """A signature of its calls. The bucket does not hold it, as it holds the bucket."""
        subject, signature = self.subject, self.subject.call.signature
        described = signature.fn, self.arguments, signature.paths
        if subject.exact:
            return fixed_signature(*described, (), [], self._no_program)
        # An axis of size 0 is no variable of the program, so nothing is asked of its size.
        variables = subject.call.sizes.keys()
        parsed = ((text, parse_constraint(text)) for text in signature.constraints)
        constraints = [text for text, guard in parsed if guard.variables <= variables]
        programs = [(subject.program, frozenset[str]())]
        return fixed_signature(*described, constraints, programs, self._no_program)

    def of(self, program: Interface, call: Call, learns: bool = True) -> dict[str, int]:
        self.check(call.sizes)
        bucket = self.subject.bucket
        for name, size in zip(program.unfitted, call.size_constants.sizes, strict=True):
            if size > bucket[name]:
                raise ArgumentError(
                    f"at {shown(call.sizes)} the size {name} of an array inside of the function is "
                    f"{size}, compiled for {name} at most {bucket[name]}; lower it with arguments "
                    "of these sizes"
                )
        return dict(bucket)

    def check(self, sizes: Mapping[str, int]) -> None:
        beyond = [v for v, n in sizes.items() if n > self.subject.bucket[v]]
        if beyond:
            raise ArgumentError(in_words([self._beyond(v, sizes) for v in beyond]))
        if min(sizes.values()) < 1:
            raise ArgumentError(
                f"a size below 1 has no bucket ({shown(sizes)}); call the bucketed function, or "
                "lower it with such arguments"
            )
        program = self.subject.program
        if not program.admits(sizes):
            broken = [str(g) for g in program.guards if not g.holds(sizes)]
            raise ArgumentError(
                f"{shown(sizes)} needs another program: this one holds for "
                f"{' and '.join(broken) or 'sizes at which the function traces alike'}; lower it "
                "again with arguments of these sizes"
            )

    def _beyond(self, variable: str, sizes: Mapping[str, int]) -> str:
        """Say at which argument a size is beyond its bucket."""
        for leaf in self.arguments.facts.leaves:
            texts = [axis for axis in leaf.shape if isinstance(axis, str)]
            if any(variable in variables_of(text) for text in texts):
                break
        shape = tuple(evaluate_text(n, sizes) if isinstance(n, str) else n for n in leaf.shape)
        called = shape[0] if leaf.dtype is None else leaf._replace(shape=shape)
        return (
            f"{leaf.path}: compiled for {leaf} with {variable} at most "
            f"{self.subject.bucket[variable]}, called with {called}, where {variable} is "
            f"{sizes[variable]}"
        )

    def _no_program(self, tokens: Tokens, shapes: Shapes) -> Resolution:
        """Say why the program does not serve a call; calls at an exact shape need none."""
        subject, paths = self.subject, self.subject.call.signature.paths
        if subject.exact:
            return Resolution(tokens, bind_sizes(tokens, shapes, paths), None)
        self.check(bind_sizes(subject.call.tokens, shapes, paths))
        raise ArgumentError(f"no program serves the shapes {list(shapes)}; lower it again for them")
