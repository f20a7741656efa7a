"""Sign the examples of a call of `map`, and decide what examples of equal shapes do.

The first example is signed like any call. Of the others only the mapped arguments are looked at:
their trees, types and shapes. All examples of equal shapes are one `Kind`: one resolved call, and
one decision.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bucketjit._arrays.padding import fresh
from bucketjit._compile.argument_types import is_open, padded_leaf_shapes
from bucketjit._compile.rows import Rows
from bucketjit._config import Fallback
from bucketjit._events import Verbatim, counted
from bucketjit._ir.dynamic_axes import STATIC, is_list_of_numbers
from bucketjit._ir.expressions import evaluate_text
from bucketjit._ir.interface import Interface
from bucketjit._jax.arrays import is_on_several_devices
from bucketjit._runtime.decisions import OF_FILE, Because, Decision, Masked, Unpadded
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.rows.examples import Examples, Values, is_number, places_of_arguments
from bucketjit._tracing.call import Call
from bucketjit._tracing.leaf_types import LeafType, leaf_type
from bucketjit.errors import ArgumentError, BucketJitError, FallbackError, MaskingError

_REMEMBERED = 4096  # kinds that a signature remembers
_MOST_BYTES = 1 << 16  # of the constants of a kind that is remembered

NO_SIZES = MaskingError("no axis of the lists of examples is open", "name it in dynamic_axes")


@dataclass(frozen=True)
class Batched:
    """Examples run in batches.

    Attributes:
        program: Their program.
        bucket: The padded size of each variable.
        tokens: The padded tokens of one example: the positions along the open axes of the mapped
            argument that has most.
        elements: Elements of the padded mapped arguments with open axes, per example.
        nbytes: Bytes of the padded mapped arguments of one example.
        shared_bytes: Bytes of the arguments that all examples share.
    """

    program: Interface
    bucket: dict[str, int]
    tokens: int
    elements: int
    nbytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Alone:
    """Examples run one by one; without ``why``, the call itself says ``words`` for it."""

    why: MaskingError | None
    words: str = ""

    @property
    def reason(self) -> str:
        return self.words if self.why is None else self.why.reason


@dataclass(eq=False)
class Kind:
    """Examples of equal shapes. It is kept for later calls, so it holds none of their arrays.

    Attributes:
        call: Their call, without its leaves.
        way: How they run.
        version: `Refusals.version` when that was decided.
        real: Elements of the mapped arguments with open axes, per example.
        ordered: The logical size of each variable.
        key: `Call.shape_key` of their calls.
    """

    call: Call
    way: Batched | Alone
    version: int
    real: int = 0

    def __post_init__(self) -> None:
        """Compute what each example would compute anew."""
        self.ordered, self.key = self.call.ordered, self.call.shape_key


class Row(NamedTuple):
    """One example: the leaves of its mapped arguments, its kind, and a call of its signature."""

    leaves: Sequence[Any]
    kind: Kind
    like: Call


class Kinds:
    """Signs the examples of one call of `map`, and decides what they do.

    Attributes:
        engine: The engine of the function.
        mapped: The mapped leaves: their positions among the leaves of a call.
        sharding: How the rows of batches are sharded; None if they are not.
        shared: The leaves that all examples share, by position and padded shape.
        first: The first example, once it is signed.
    """

    first: Call

    def __init__(self, engine: Engine, examples: Examples) -> None:
        self.engine = engine
        self._examples = examples
        self.shared: dict[tuple[int, Any], Any] = {}
        self._trees: list[Any] = []
        self._values: Values = ()
        self._kinds: dict[Any, tuple[Kind, Call]] = {}
        # An example of each signature: weak types may differ.
        self._variants: dict[tuple[LeafType, ...], Call] = {}
        self.mapped: tuple[int, ...] = ()
        self.sharding: NamedSharding | None = None

    def row(self, index: int, values: Values) -> Row:
        # Most examples are NumPy arrays, which are leaves themselves.
        key: Any = tuple([(x.shape, x.dtype) for x in values if type(x) is np.ndarray])
        is_plain = len(key) == len(values)
        if is_plain and (known_kind := self._kinds.get(key)) is not None:
            return Row(values, *known_kind)
        try:
            if not self._values:
                self._begin(values)
            leaves = self._leaves(index, values)
            types, shapes = self._types(index, leaves)
            key = key if is_plain else (types, shapes)
            if (known_kind := self._kinds.get(key)) is None:
                like = self._variants.get(types)
                if like is None:
                    like = self._variants[types] = self._signed(values)
                known_kind = self._kinds[key] = self._kind(like, leaves, shapes), like
            return Row(leaves, *known_kind)
        except BucketJitError as error:
            text = str(error)
            if text.startswith(f"example {index}"):
                raise
            named = copy.copy(error)  # a stored error may be raised for several examples
            cure = self._cure(values, text)
            if cure:  # not that of a call, where the argument is no list of examples
                text = text.partition("; pass np.asarray")[0]
            named.args = (f"example {index}: {text}{cure}",)
            raise named.with_traceback(error.__traceback__) from error.__cause__
        except Exception as error:  # of the user's function, which was traced
            error.add_note(f"bucketjit: this is example {index} of map{self._cure(values)}")
            raise

    def _cure(self, values: Values, text: str = "") -> str:
        """What to pass for numbers or lists of them. An error without a name may be about any."""
        pairs = list(zip(self._examples.names, values, strict=True))
        about = [pair for pair in pairs if text.startswith(f"{pair[0]}: ")] if text else pairs
        cures = [_array_of_examples(name, value) for name, value in about]
        return f"; {cures[0]}" if cures and all(cures) else ""

    def call_of(self, row: Row) -> Call:
        leaves = list(row.like.leaves)
        for i, leaf in zip(self.mapped, row.leaves, strict=True):
            leaves[i] = leaf
        call = row.kind.call
        for i in call.with_leaves(leaves).donated_leaves if call.donate else ():
            leaves[i] = fresh(leaves[i])  # all examples share it
        return call.with_leaves(leaves)

    def rows(self, count: int, summed: bool = False, in_turn: bool = False) -> Rows:
        placement = placement_of(self.sharding, count)
        return Rows(count, frozenset(self.mapped), summed, placement, in_turn)

    def _begin(self, values: Values) -> None:
        examples, call = self._examples, self._signed(values)
        places = places_of_arguments(call)
        parts = [places[name] for name in examples.mapped]
        self._values = values
        self._trees = [jax.tree_util.tree_structure(part) for part in parts]
        self.mapped = tuple(i for part in parts for i in jax.tree_util.tree_leaves(part))
        self.first = call
        self.sharding = rows_sharding(
            leaf for i, leaf in enumerate(call.leaves) if i not in self.mapped
        )
        self._variants[tuple(call.signature.types[i] for i in self.mapped)] = call

    def _leaves(self, index: int, values: Values) -> list[Any]:
        leaves: list[Any] = []
        every = enumerate(zip(self._examples.names, self._trees, values, strict=True))
        for place, (name, tree, value) in every:
            flat, of = jax.tree_util.tree_flatten(value)
            if of != tree:
                got, first = _in_words(value), _in_words(self._values[place])
                words = (str(of), str(tree)) if got == first else (got, first)
                either = value if is_list_of_numbers(value) else self._values[place]
                cure = _array_of_examples(name, either) or "give all examples the same structure"
                raise ArgumentError(
                    f"example {index}, {name}: {words[0]}, but example 0 has {words[1]}; {cure}"
                )
            leaves += flat
        return leaves

    def _types(
        self, index: int, leaves: Sequence[Any]
    ) -> tuple[tuple[LeafType, ...], tuple[tuple[int, ...], ...]]:
        signature = self.first.signature
        types, shapes = [], []
        for place, leaf in zip(self.mapped, leaves, strict=True):
            wanted, path = signature.types[place], signature.paths[place]
            kind, shape = leaf_type(leaf, path)
            if wanted.dtype is None:
                if isinstance(leaf, bool) or not isinstance(leaf, int | np.integer):
                    raise ArgumentError(
                        f"example {index}, {path}: a size must be an int, got {leaf!r}"
                    )
                kind, shape = wanted, (int(leaf),)
            elif kind.dtype != wanted.dtype or kind.rank != wanted.rank:
                tokens, sizes_of_first = signature.tokens, self.first.shapes[place]
                row = ("_",) * wanted.rank if tokens is None else tokens[place]
                sizes = [n if t == STATIC else t for t, n in zip(row, sizes_of_first, strict=True)]
                cure = (
                    f"convert it by .astype({str(wanted.dtype)!r})"
                    if kind.rank == wanted.rank
                    else "reshape it, or map examples of another rank by themselves"
                )
                raise ArgumentError(
                    f"example {index}, {path}: {_shown(kind, shape)}, the others are "
                    f"{_shown(wanted, sizes)}; {cure}"
                )
            types.append(kind)
            shapes.append(shape)
        return tuple(types), tuple(shapes)

    def _signed(self, values: Values) -> Call:
        args, kwargs = self._examples.call(values)
        return self.engine.signer.sign(args, kwargs)

    def _kind(self, like: Call, leaves: Sequence[Any], shapes: tuple[tuple[int, ...], ...]) -> Kind:
        every, all_shapes = list(like.leaves), list(like.shapes)
        for i, leaf, shape in zip(self.mapped, leaves, shapes, strict=True):
            every[i], all_shapes[i] = leaf, shape
        call = dataclasses.replace(like, leaves=every, shapes=all_shapes)
        memory, key = like.signature.remembered, (self.mapped, *all_shapes)
        tokens, remembered = memory.get(key, (None, None))
        engine = self.engine
        if (
            remembered is not None
            and tokens is like.signature.tokens
            and remembered.version == engine.refusals.version
            # Buckets grow with sizes that did not fit.
            and (remembered.call.program is None or not remembered.call.program.unfitted)
        ):
            return remembered
        call, decision = engine.chosen(call)
        way = self._way(call, decision)
        kind = Kind(call.with_leaves([]), way, engine.refusals.version, self._real(call))
        if isinstance(way, Batched) and call.size_constants.nbytes <= _MOST_BYTES:
            if len(memory) >= _REMEMBERED:
                memory.clear()
            memory[key] = like.signature.tokens, kind
        return kind

    def _way(self, call: Call, decision: Decision) -> Batched | Alone:
        engine = self.engine
        match decision:
            case Masked(program, bucket, None):
                why = engine.refusals.of_batches(program, call, self.mapped)
                if why is not None:
                    if engine.config.fallback is Fallback.ERROR and why is not OF_FILE:
                        raise FallbackError(why.reason, why.remedy)
                    return Alone(why)
                return self.batched(call, program, bucket)
            case Unpadded(Because.UNMASKED, why) if engine.config.fallback is Fallback.ERROR:
                raise FallbackError(why.reason, why.remedy)
            case Unpadded(Because.NO_OPEN_AXIS):
                return Alone(NO_SIZES)
            case Unpadded(_, why):
                return Alone(None, why.reason)
            case Masked(beyond=beyond):
                return Alone(None, str(beyond))

    def batched(self, call: Call, program: Interface, bucket: Any) -> Batched:
        """How examples run in the batches of a bucket."""
        # It raises if a padded argument would be too large.
        padded = dict(padded_leaf_shapes(call, bucket))
        sizes, places = dict(bucket), frozenset(self.mapped)
        tokens = [
            math.prod(evaluate_text(t, sizes) for t in call.tokens[i] if is_open(t)) for i in places
        ]
        nbytes = {
            i: math.prod(padded.get(i, call.shapes[i])) * kind.dtype.itemsize
            for i, kind in enumerate(call.signature.types)
            if kind.dtype is not None
        }
        elements = sum(math.prod(shape) for i, shape in padded.items() if i in places)
        mapped = sum(n for i, n in nbytes.items() if i in places)
        shared = sum(nbytes.values()) - mapped
        return Batched(program, sizes, max([1, *tokens]), elements, mapped, shared)

    def _real(self, call: Call) -> int:
        tokens, types = call.tokens, call.signature.types
        opened = [
            i for i in self.mapped if any(map(is_open, tokens[i])) and types[i].dtype is not None
        ]
        return sum(math.prod(call.shapes[i]) for i in opened)


def rows_sharding(leaves: Iterable[Any]) -> NamedSharding | None:
    """How the rows of batches are sharded: over the first axis of the mesh of an argument."""
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and is_on_several_devices(sharding):
            if AxisType.Explicit in sharding.mesh.axis_types:
                return None
            return NamedSharding(sharding.mesh, PartitionSpec(sharding.mesh.axis_names[0]))
    return None


def placement_of(sharding: NamedSharding | None, count: int) -> NamedSharding | None:
    """The sharding of a batch; None if the devices cannot have equal numbers of its rows."""
    if sharding is None or count % sharding.mesh.shape[sharding.mesh.axis_names[0]]:
        return None
    return sharding


def _shown(kind: LeafType, shape: Sequence[Any]) -> str:
    return f"{kind.dtype}[{', '.join(map(str, shape))}]"


def _array_of_examples(name: str, value: Any) -> str:
    """What to pass if an example is a number or a list of numbers; ``""`` if it is neither."""
    if is_list_of_numbers(value):
        return f"where an array is meant for each example, pass [np.asarray(one) for one in {name}]"
    return f"where {name} is one example, pass [np.asarray({name})]" if is_number(value) else ""


def _in_words(value: Any) -> str:
    """An example in words: its structure, and where it has arrays and numbers."""
    if is_list_of_numbers(value):
        return f"a {type(value).__name__} of {counted(len(value), 'number')}"
    leaves, tree = jax.tree_util.tree_flatten(value)
    words = ["number" if isinstance(x, int | float | complex) else "array" for x in leaves]
    if leaves and leaves[0] is value:
        return f"a {words[0]}".replace("a a", "an a")
    return repr(jax.tree_util.tree_unflatten(tree, map(Verbatim, words)))
