"""Runs a call in chunks along an axis and joins their results (`Overflow.SPLIT`).

That is right if the outputs of the program are independent along that axis, which `independence`
proves. The first call of its shapes takes the slow path, chunk by chunk. It yields a
`ChunkedHandler`, which serves later calls and runs their chunks on several cores at the same time.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax

from bucketjit._arrays.padded import Padded
from bucketjit._arrays.padding import fresh, plain
from bucketjit._arrays.results import joined
from bucketjit._compile.executable import SignatureChanged
from bucketjit._config import Config, Out, Overflow
from bucketjit._runtime.buckets import policy_of
from bucketjit._runtime.chunks.chunked_handler import ChunkedHandler, Piece, by_argument, spans
from bucketjit._runtime.chunks.independence import split_axes
from bucketjit._runtime.fast_path.dispatch import CallArguments, FastPath
from bucketjit._runtime.fast_path.handler import Evicted, Handler
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall
from bucketjit._sizes.dynamic_axes import Tokens
from bucketjit._sizes.expressions import evaluate_text, variables_of
from bucketjit._tracing.concrete import at_other_sizes
from bucketjit._tracing.program import Program
from bucketjit.errors import BucketOverflowError, MaskingError, SplitError

# How many sizes below the largest bucket are tried for chunks, to satisfy the program's guards.
_ATTEMPTS = 16
Serve = Callable[[SignedCall, ResolvedCall, CallArguments | None], Any]
FindHandler = Callable[[SignedCall, ResolvedCall, CallArguments], Handler | None]
_Shown = tuple[int | None, ...] | MaskingError  # the axes of the outputs, or why they are refused


class Splitting(NamedTuple):
    """How a call is cut into chunks.

    Attributes:
        variable: The dimension variable that is cut.
        sizes: Its size in each chunk.
        axes: For each output, the axis along which chunks are joined, or None if all are the same.
        largest: The largest bucket of the variable.
        untraced: The sizes of chunks at which the function may trace to another program than that
            of the whole call.
    """

    variable: str
    sizes: tuple[int, ...]
    axes: tuple[int | None, ...]
    largest: int
    untraced: frozenset[int] = frozenset()

    def part(self, call: ResolvedCall, size: int) -> ResolvedCall:
        """A chunk of a call, resolved.

        A chunk is served by the program and the size constants of the whole call, because the proof
        is about these. Tracing the function at the size of a chunk could yield another program: at
        size 1 JAX broadcasts by other equations.

        Args:
            call: The whole call.
            size: The variable's size in the chunk.

        Returns:
            The chunk. It has ``whole`` if its size is one of ``untraced``.
        """
        return dataclasses.replace(
            call,
            sizes={**call.sizes, self.variable: size},
            size_constants=dataclasses.replace(call.size_constants, out_tree=None),
            whole=call.whole or (call.sizes if size in self.untraced else None),
        )


def pieces(signed: SignedCall, call: ResolvedCall, splitting: Splitting) -> list[Piece]:
    """How the leaves of a call are cut.

    Args:
        signed: The call.
        call: The same call, resolved.
        splitting: How to cut it.

    Returns:
        A piece for each leaf that has the variable.
    """
    found = []
    for i, axis, token in _cut_axes(call.tokens, splitting.variable):

        def size(n: int, token: str = token) -> int:
            return evaluate_text(token, {**call.sizes, splitting.variable: n})

        if signed.signature.types[i].dtype is None:
            found.append(Piece(i, None, values={n: size(n) for n in set(splitting.sizes)}))
        else:
            found.append(Piece(i, axis, size(1)))
    return found


@functools.lru_cache(maxsize=1024)
def _cut_axes(tokens: Tokens, variable: str) -> list[tuple[int, int, str]]:
    """The first axis of each leaf that has a variable: leaf, axis and token."""
    found = []
    for leaf, row in enumerate(tokens):
        axis = next((i for i, token in enumerate(row) if variable in variables_of(token)), None)
        if axis is not None:
            found.append((leaf, axis, row[axis]))
    return found


def chunk(signed: SignedCall, cut: Sequence[Piece], start: int, stop: int) -> SignedCall:
    """The call of one chunk.

    Donated leaves are copied, because the other chunks need the same arrays.

    Args:
        signed: The whole call.
        cut: How its leaves are cut.
        start: The first position of the variable in the chunk.
        stop: The position after the last one.

    Returns:
        The chunk.
    """
    positional, _ = signed.tree.unflatten(range(len(signed.leaves)))
    donated = set(jax.tree_util.tree_leaves([positional[i] for i in signed.donate]))
    leaves, shapes = list(signed.leaves), list(signed.shapes)
    for piece in cut:
        value = piece.of(leaves[piece.leaf], start, stop)
        leaves[piece.leaf] = value
        shapes[piece.leaf] = (int(value),) if piece.axis is None else tuple(value.shape)
    for i in donated:
        leaves[i] = fresh(leaves[i])
    return dataclasses.replace(signed, leaves=leaves, shapes=shapes, is_chunk=True)


def _without_padding(signed: SignedCall, cut: Sequence[Piece]) -> SignedCall:
    """The call with its `Padded` arrays cut to their logical sizes, once for all chunks."""
    leaves = list(signed.leaves)
    for piece in cut:
        leaves[piece.leaf] = plain(leaves[piece.leaf])
    return dataclasses.replace(signed, leaves=leaves)


def _as_given(signed: SignedCall, given: CallArguments, fast_path: FastPath) -> CallArguments:
    """The arguments of a chunk, in the form of those of the whole call."""
    args = list(given.args)
    positional, named = signed.tree.unflatten(signed.leaves)
    for position, value in zip(signed.dynamic, positional, strict=True):
        args[position] = value
    return CallArguments(args, {**given.kwargs, **named}, fast_path)


class Splitter:
    """Runs calls in chunks.

    Args:
        config: The configuration.
        lock: Held while programs are traced.
    """

    def __init__(self, config: Config, lock: AbstractContextManager[Any]) -> None:
        self._config = config
        self._lock = lock
        self._shown: weakref.WeakKeyDictionary[Program, dict[str, _Shown]]
        self._shown = weakref.WeakKeyDictionary()

    def clear(self) -> None:
        """Forget the proofs of all programs."""
        self._shown.clear()

    def splitting(self, call: ResolvedCall, error: BucketOverflowError) -> Splitting:
        """How to cut a call with a size beyond the largest bucket.

        Args:
            call: The call; it has a program.
            error: The error of choosing its bucket.

        Returns:
            The variable, the sizes of the chunks, and the axes to join their results along.

        Raises:
            SplitError: It is not proven that chunks are independent, or the program does not hold
                at the sizes of chunks.
            BucketOverflowError: ``error``, if the policy of its variable is not to split.
        """
        variable, largest = error.dim, error.largest
        total = call.sizes.get(variable, 0) if variable is not None else 0
        if variable is None or not 1 <= largest < total:
            raise error
        if policy_of(self._config, variable) is not Overflow.SPLIT:
            raise error
        try:
            assert isinstance(call.program, Program)
            axes = self._axes(call.program, variable)
            sizes, untraced = self._sizes(call.program, call, variable, largest)
        except MaskingError as why:
            raise SplitError(total, largest, variable, why.reason, why.remedy) from None
        return Splitting(variable, sizes, axes, largest, untraced)

    def run(
        self,
        serve: Serve,
        find_handler: FindHandler,
        signed: SignedCall,
        call: ResolvedCall,
        splitting: Splitting,
        out: Out,
        given: CallArguments | None,
        fast_path: FastPath,
    ) -> tuple[Any, ChunkedHandler | None]:
        """Run a call in chunks, each an ordinary call, and join their results.

        Args:
            serve: Runs a resolved chunk, with results in the form `Out.PADDED`. Takes the chunk's
                arguments in the form of the whole call, to remember the chunk; None to not do so.
            find_handler: Returns the handler of a chunk without running it, or None.
            signed: The call. Its donated arguments are left alone.
            call: The same call, resolved.
            splitting: How to cut it.
            out: The form of results.
            given: The arguments as they came, to make a handler; None to make none.
            fast_path: The handlers of chunks of this program's calls.

        Returns:
            The result, and the handler for calls like this one; None if there is none.

        Raises:
            SplitError: The chunks return different trees.
            Exception: Whatever ``serve`` raises.
        """
        cut = pieces(signed, call, splitting)
        ends = spans(splitting.sizes)
        whole = _without_padding(signed, cut)
        assert call.program is not None
        weak_types = [weak for _, weak in call.program.out_types]
        told = sum(splitting.sizes), splitting.largest, splitting.variable
        join = functools.partial(
            _join, told, splitting.axes, weak_types, out, call.size_constants.out_tree
        )
        if given is None or signed.donate:
            parts = [(chunk(whole, cut, *at), splitting.part(call, at[1] - at[0])) for at in ends]
            return join([serve(*part, None) for part in parts]), None
        results: dict[int, Any] = {}
        handlers: dict[int, Handler] = {}  # by size of the chunk
        # First find a handler for each size of chunks; a chunk is run only where that is needed to
        # get one. The chunks that are left then run at the same time, by the chunked handler.
        for i, size in enumerate(splitting.sizes):
            if size in handlers:
                continue
            own, part = chunk(whole, cut, *ends[i]), splitting.part(call, size)
            like = _as_given(own, given, fast_path)
            handler = _fitting(fast_path, like, functools.partial(results.setdefault, i))
            if handler is None and i not in results:
                handler = find_handler(own, part, like)
            if handler is None and i not in results:
                results[i] = serve(own, part, like)
                handler = fast_path.find(like.args, like.kwargs)
            if handler is not None:
                handlers[size] = handler
        left = [i for i in range(len(ends)) if i not in results]
        shorter = None
        if handlers.keys() == set(splitting.sizes):
            cuts = by_argument(signed, given, cut)
            padded = any(type(signed.leaves[piece.leaf]) is Padded for piece in cut)
            shorter = ChunkedHandler(splitting.sizes, handlers, cut, cuts, join, padded)
            try:
                found = shorter.run(left, given.args, given.kwargs)
            except (SignatureChanged, Evicted):
                shorter = None
            else:
                results.update(zip(left, found, strict=True))
        # Without a chunked handler, or where it did not fit: one by one on the slow path.
        for i in range(len(ends)):
            if i not in results:
                own = chunk(whole, cut, *ends[i])
                part = splitting.part(call, splitting.sizes[i])
                results[i] = serve(own, part, _as_given(own, given, fast_path))
        return join([results[i] for i in range(len(ends))]), shorter

    def _axes(self, program: Program, variable: str) -> tuple[int | None, ...]:
        known = self._shown.setdefault(program, {})
        shown = known.get(variable)
        if shown is None:
            try:
                shown = split_axes(program, variable)
            except MaskingError as refusal:
                shown = refusal.without_frames()
            known[variable] = shown
        if isinstance(shown, MaskingError):
            raise shown.without_frames()
        return shown

    def _sizes(
        self, program: Program, call: ResolvedCall, variable: str, largest: int
    ) -> tuple[tuple[int, ...], frozenset[int]]:
        """The sizes of the chunks, as large as the guards of the program allow.

        The size constants at the size of a chunk must be those of the whole call. Where the
        function traces to another program at the size of a chunk, the constants at the first sample
        of the pairing count instead, so that the chunks of all calls have the same constants.

        Returns:
            The sizes, and those of them at which the function may trace to another program.

        Raises:
            MaskingError: No sizes near the largest bucket satisfy the guards, or the size constants
                differ.
        """
        sizes, total = call.sizes, call.sizes[variable]
        traced_at = call.whole or sizes
        constants = [x.tobytes() for x in call.size_constants.values]
        changed = False
        untraced: set[int] = set()

        def has_same_constants(n: int) -> bool | None:
            """Whether the size constants are the same at size ``n``; None if there are none."""
            nonlocal changed
            with self._lock:
                size_constants = at_other_sizes(
                    lambda: program.size_constants({**traced_at, variable: n})
                )
            if size_constants is None:
                return None
            same = [x.tobytes() for x in size_constants.values] == constants
            changed |= not same
            return same

        def serves(n: int) -> bool:
            same = has_same_constants(n)
            if same is not None:
                return same
            if program.pairing is None or not program.admits({**sizes, variable: n}):
                return False
            if not has_same_constants(program.pairing.samples[0][variable]):
                return False
            untraced.add(n)
            return True

        # `serves` sets `changed`, if it is the constants that differ and not a guard that fails.
        if not serves(largest) and changed:
            raise MaskingError(
                f"a number that the function computes of sizes is another for chunks of {largest}",
                f"compute it of other sizes than {variable}",
            )
        for size in range(largest, max(0, largest - _ATTEMPTS), -1):
            if not serves(size):
                continue
            whole, rest = divmod(total, size)
            if not rest:
                return (size,) * whole, frozenset(untraced)
            # The rest gets a chunk of its own. If the guards refuse its size, the last full chunk
            # gives some of its positions to it.
            for moved in range(min(_ATTEMPTS, size - rest + 1, size)):
                if serves(size - moved) and serves(rest + moved):
                    chunks = (*(size,) * (whole - 1), size - moved, rest + moved)
                    return chunks, frozenset(untraced)
        raise _no_sizes(program, sizes, variable, largest)


def _no_sizes(
    program: Program, sizes: Mapping[str, int], variable: str, largest: int
) -> MaskingError:
    """The error of a call for whose chunks no sizes near the largest bucket satisfy the guards."""
    broken = [
        (size, f"where {guard}")
        for size in (largest, sizes[variable] % largest or largest)
        for guard in program.guards
        if not guard.holds({**sizes, variable: size})
    ]
    size, what = broken[0] if broken else (largest, "at sizes like this")
    return MaskingError(
        f"the function was traced {what}, and may do something else for chunks of {size}",
        f"let it not decide by sizes, and name {variable} in dynamic_axes wherever an argument "
        "has that size",
    )


def _fitting(
    fast_path: FastPath, given: CallArguments, ran: Callable[[Any], Any]
) -> Handler | None:
    """The handler of a chunk that was served before; None if there is none.

    Args:
        fast_path: The handlers of chunks.
        given: The arguments of the chunk.
        ran: Called with the result, if the chunk had to be run: of several handlers only running
            shows which one fits, as static leaves may differ.
    """
    handler = fast_path.find(given.args, given.kwargs)
    while handler is not None and handler.next is not None:
        try:
            ran(handler.serve(given.args, given.kwargs))
            break
        except (SignatureChanged, Evicted):
            handler = handler.next
    return handler


def _join(
    told: tuple[int, int, str | None],
    axes: Sequence[int | None],
    weak_types: Sequence[bool],
    out: Out,
    nested: object,
    results: Sequence[Any],
) -> Any:
    """Join the results of chunks to the result of the call.

    Args:
        told: The first arguments of `SplitError`: size, largest bucket, variable.
        axes: For each output the axis to join along; None if all chunks return the same.
        weak_types: Whether each output is weakly typed.
        out: The form of results.
        nested: The tree of the result if it depends on the logical sizes, else None. Then the trees
            of chunks differ from it, and need not agree.
        results: The results of the chunks, in the form `Out.PADDED`.
    """
    leaves: list[Any]
    tree: Any
    leaves, tree = jax.tree_util.tree_flatten(list(results))
    first, *others = tree.children()
    if nested is None and any(other != first for other in others):
        shown = " and ".join(sorted({str(first), *map(str, others)}))
        raise SplitError(*told, f"chunks return different trees, {shown}")
    whole = [
        joined(leaves[i :: first.num_leaves], axis, weak, out)
        for i, (axis, weak) in enumerate(zip(axes, weak_types, strict=True))
    ]
    return jax.tree_util.tree_unflatten(first if nested is None else nested, whole)
