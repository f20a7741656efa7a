"""The engine of one executable: it takes the calls of one bucket, or of one exact shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from bucketjit._compile.executable import Executable
from bucketjit._compile.requests import Requests
from bucketjit._config import Fallback
from bucketjit._events import shown
from bucketjit._jax.config import trace_context
from bucketjit._runtime.buckets import Exactly
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.engine_parts import Parts
from bucketjit._runtime.shared_state import SharedState
from bucketjit._signature.argument_facts import open_shapes
from bucketjit._signature.axis_guesses import Shapes
from bucketjit._signature.binding import bind_sizes
from bucketjit._signature.changes import Key
from bucketjit._signature.made_for import MadeFor, fixed_signature
from bucketjit._signature.mismatches import in_words
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signature import Signature
from bucketjit._signature.signer import Signer
from bucketjit._sizes.dynamic_axes import Tokens
from bucketjit._sizes.expressions import evaluate_text, variables_of
from bucketjit._stages.subject import Subject
from bucketjit._tracing.interface import Interface
from bucketjit.errors import ArgumentError


def engine_of(one: OneBucket, entry: Executable) -> Engine:
    """An engine that serves calls by one executable, whatever becomes of any other cache."""
    subject = one.subject
    parent, signed = subject.engine, subject.signed
    config = dataclasses.replace(
        parent.config,
        fn=signed.signature.fn,
        static_argnums=(),
        static_argnames=(),
        donate_argnums=(),
        copy_inputs=False,
        fallback=Fallback.ERROR,
        maxsize=None,
        max_bytes=None,
        background=None,
    )
    signature = one.signature()

    def signature_of(key: Key) -> Signature:
        one.check_configuration()
        return signature

    parts = Parts(
        signer=lambda config: Signer(config, one.arguments, signature_of),
        buckets=lambda config, lock: one,
        lock=lambda: parent.lock,
    )
    engine = Engine(config, SharedState(config, parent.name, parent.counters), parts)
    if subject.exact:
        key: Any = signature, tuple(signed.shapes)
    else:
        key = Requests.masked_key(subject.program, subject.bucket)
    engine.cache.get_or_compile(key, lambda: entry)
    with parent.lock:
        parent.memories_apart.add(engine.memory)
    return engine


def _context() -> Any:
    with jax.disable_jit(False):  # as in JAX, the stages do not depend on it
        return trace_context()


class OneBucket:
    """What calls of one executable may have: types, programs, sizes.

    Attributes:
        subject: What was compiled.
        arguments: The types.
    """

    def __init__(self, subject: Subject) -> None:
        signed, name = subject.signed, subject.engine.signer.name
        self.subject = subject
        self._context = _context()
        tokens: Tokens = subject.call.tokens
        if subject.exact:
            tokens = tuple(("_",) * len(shape) for shape in signed.shapes)
        statics = signed.statics
        self.arguments = MadeFor(
            "compiled for",
            signed.tree,
            signed.signature.types,
            open_shapes(tokens, signed.shapes),
            subject.name_of,
            ({name(i): value for i, value in statics.positional.items()}, statics.keyword),
            signed.leaves,
        )

    def signature(self) -> Signature:
        """A signature of its calls. The bucket does not hold it, as it holds the bucket."""
        subject, signature = self.subject, self.subject.signed.signature
        return fixed_signature(
            signature.fn,
            self.arguments,
            signature.paths,
            () if subject.exact else signature.constraints,
            [] if subject.exact else [(subject.program, frozenset())],
            self._no_program,
        )

    def check_configuration(self) -> None:
        """Raise an error if JAX is configured in another way."""
        if _context() != self._context:
            raise ArgumentError(
                "the configuration of JAX (jax_enable_x64, matmul precision, a mesh) differs from "
                "that at lowering; call it under the same configuration, or lower it again"
            )

    def of(self, program: Interface, call: ResolvedCall) -> dict[str, int]:
        """The bucket, if it holds a call."""
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

    def beyond(self, program: Interface, sizes: Mapping[str, int]) -> Exactly | None:
        """Nothing: a size beyond the bucket is refused."""

    def clear(self) -> None:
        """Nothing: the bucket is what was compiled."""

    def check(self, sizes: Mapping[str, int]) -> None:
        """Raise an error if the executable does not serve these sizes."""
        beyond = {v: n for v, n in sizes.items() if n > self.subject.bucket[v]}
        if beyond:
            raise ArgumentError(in_words(list(self._beyond(sizes, beyond))))
        if min(sizes.values()) < 1:
            raise ArgumentError(
                f"a size below 1 has no bucket ({shown(sizes)}); call the bucketed function, or "
                "lower it with such arguments"
            )
        self.subject.signed.signature.check_constraints(sizes)
        program = self.subject.program
        if not program.admits(sizes):
            broken = [str(g) for g in program.guards if not g.holds(sizes)]
            broken = broken or list(map(str, program.presumed))
            raise ArgumentError(
                f"{shown(sizes)} needs another program: this one holds for "
                f"{' and '.join(broken) or 'sizes at which the function traces alike'}; lower it "
                "again with arguments of these sizes"
            )

    def _beyond(self, sizes: Mapping[str, int], beyond: Mapping[str, int]) -> Iterator[str]:
        """A line for each size that is beyond its bucket, at the first argument that has it."""
        for variable, size in beyond.items():
            for made in self.arguments.facts.leaves:
                texts = [axis for axis in made.shape if isinstance(axis, str)]
                if any(variable in variables_of(text) for text in texts):
                    shape = tuple(
                        evaluate_text(n, sizes) if isinstance(n, str) else n for n in made.shape
                    )
                    called = shape[0] if made.dtype is None else made._replace(shape=shape)
                    yield (
                        f"{made.path}: compiled for {made} with {variable} at most "
                        f"{self.subject.bucket[variable]}, called with {called}, where "
                        f"{variable} is {size}"
                    )
                    break

    def _no_program(
        self, tokens: Tokens, shapes: Shapes, presumed: Mapping[str, int]
    ) -> ResolvedCall:
        """Say why the program does not serve a call; calls at an exact shape need none."""
        subject, paths = self.subject, self.subject.signed.signature.paths
        if subject.exact:
            return ResolvedCall(tokens, bind_sizes(tokens, shapes, paths), None)
        if presumed:
            told = "; ".join(subject.program.computed_in_words())
            raise ArgumentError(
                f"the function decides by sizes that it computes ({told}), and here they are "
                f"{', '.join(f'{v} - 1 = {n - 1}' for v, n in presumed.items())}, which needs "
                "another program; call the bucketed function, which finds it"
            )
        self.check(bind_sizes(subject.call.tokens, shapes, paths))
        raise ArgumentError(f"no program serves the shapes {list(shapes)}; lower it again for them")
