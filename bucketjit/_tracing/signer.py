"""Find the signature of a call: flatten its arguments, type them, and look the signature up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bucketjit._arrays.padding import copied
from bucketjit._config import Config
from bucketjit._ir.dynamic_axes import (
    Anonymous,
    entries_of_arguments,
    is_leaf_entry,
    leaf_entries,
    names_in,
    opens,
)
from bucketjit._ir.interface import Interface
from bucketjit._jax.config import trace_context
from bucketjit._jax.patches.patch import named_now
from bucketjit._tracing.axis_guesses import is_default_name
from bucketjit._tracing.call import Call
from bucketjit._tracing.cures import remedy_for
from bucketjit._tracing.default_rule import default_entries
from bucketjit._tracing.leaf_types import LeafType, leaf_type
from bucketjit._tracing.made_for import MadeFor
from bucketjit._tracing.mutations import refusing_mutations
from bucketjit._tracing.parameters import Parameters, Statics
from bucketjit._tracing.shards import on_shards
from bucketjit._tracing.signature import Signature
from bucketjit._tracing.traced_programs import TracedPrograms
from bucketjit._tracing.why_traced import Key, nearest, why_new
from bucketjit.errors import ArgumentError, SpecError


class Signer:
    """Finds or makes the signature of each call of a bucketed function. Safe to use from threads.

    Attributes:
        fn: The function.
        parameters: The parameters of the function.
    """

    def __init__(
        self,
        config: Config,
        made_for: MadeFor | None = None,
        make: Callable[[Key], Signature] | None = None,
    ) -> None:
        self._config, self.fn = config, config.fn
        self._made_for, self._make = made_for, make
        self._parameters = self.parameters = Parameters(
            config.fn, config.static_argnums, config.static_argnames, config.donate_argnums
        )
        self._signatures: dict[Key, Signature] = {}
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forget every signature."""
        with self._lock:
            self._signatures.clear()

    def signatures(self) -> list[Signature]:
        """The signatures so far."""
        with self._lock:
            return list(self._signatures.values())

    def release(self, program: Interface) -> None:
        """Drop the reference to a program, see `Signature.release`."""
        for signature in self.signatures():
            signature.release(program)

    def sign(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Flatten the arguments of a call and find their signature."""
        positional, keywords, statics = self._parameters.split(args, kwargs)
        positions = self._parameters.dynamic_positions(len(args))
        leaves, tree = jax.tree_util.tree_flatten((positional, keywords))
        failed: ArgumentError | None = None
        try:
            types, shapes = self._types(leaves, positions, positional, keywords)
        except ArgumentError as error:
            failed = error
        if failed is not None:  # outside of the `except` block: a better error has no context
            try:
                (self._made_for or self._parameters).check_call(args, kwargs)
                raise failed
            finally:
                failed = None  # its traceback refers to this frame
        key = Key(tree, types, statics, trace_context())
        # Most calls find their signature without the lock; a miss is checked again under it.
        signature = self._signatures.get(key)
        if signature is None:
            with self._lock:
                signature = self._signatures.get(key)
                if signature is None:
                    signature = self._found(key, positions, positional, keywords)
                    self._signatures[key] = signature
        if self._made_for is not None:
            leaves = self._made_for.checked(leaves, shapes)
        shapes = [
            (int(x),) if t.dtype is None else s
            for x, s, t in zip(leaves, shapes, signature.types, strict=True)
        ]
        donated = self._parameters.donated
        donate = [new for new, old in enumerate(positions) if old in donated]
        return Call(
            *((), {}, None),
            signature=signature,
            leaves=leaves,
            shapes=shapes,
            tree=tree,
            statics=statics,
            dynamic=positions,
            donate=donate,
        )

    def name(self, position: int) -> str:
        """How errors name a positional argument."""
        return self._parameters.name(position)

    def is_static(self, name: int | str) -> bool:
        """Whether an argument is static, given by its position or its name."""
        given = self._parameters
        return name in (given.static_nums if isinstance(name, int) else given.static_names)

    def arguments_with_open_axes(
        self, count: int, keywords: Sequence[str]
    ) -> tuple[set[int], set[str]] | None:
        """The arguments whose entry in ``dynamic_axes`` opens an axis, or names a size."""
        if self._made_for is not None:
            return self._made_for.opened(count, keywords)
        spec = self._config.dynamic_axes
        if spec is None:
            return None
        positions = self._parameters.dynamic_positions(count)
        named = [k for k in keywords if k not in self._parameters.static_names]
        every, by_name = self._entries(spec, positions, named)
        return {i for i in positions if opens(every[i])}, {
            k for k in named if opens(by_name.get(k))
        }

    def leaves_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of a call in the order of `sign`, without any check of their types."""
        return self.flattened(args, kwargs)[0]

    def flattened(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], Any, Statics]:
        """The leaves of a call in the order of `sign`, and what else identifies it, unchecked."""
        positional, keywords, statics = self._parameters.split(args, kwargs)
        return *jax.tree_util.tree_flatten((positional, keywords)), statics

    def with_copies(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with copies of the NumPy arrays in those that are not static."""
        given = self._parameters
        return (
            tuple(
                x if i in given.static_nums else jax.tree_util.tree_map(copied, x)
                for i, x in enumerate(args)
            ),
            {
                name: x if name in given.static_names else jax.tree_util.tree_map(copied, x)
                for name, x in kwargs.items()
            },
        )

    def _types(
        self, leaves: Sequence[Any], positions: Sequence[int], args: Any, kwargs: Any
    ) -> tuple[tuple[LeafType, ...], list[tuple[int, ...]]]:
        try:
            pairs = [leaf_type(x, "") for x in leaves]
        except ArgumentError:
            pairs = []
        if len(pairs) < len(leaves):  # paths take long to make, so only an error has them
            remedy = remedy_for((args, kwargs))
            paths = self._paths(positions, args, kwargs)
            pairs = [leaf_type(x, path, remedy) for path, x in paths]
        return tuple(t for t, _ in pairs), [s for _, s in pairs]

    def _paths(
        self, positions: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[tuple[str, Any]]:
        named = [(self._parameters.name(i), a) for i, a in zip(positions, args, strict=True)]
        named += [(k, kwargs[k]) for k in sorted(kwargs)]
        return [
            (name + jax.tree_util.keystr(keys), leaf)
            for name, value in named
            for keys, leaf in jax.tree_util.tree_flatten_with_path(value)[0]
        ]

    def _found(
        self,
        key: Key,
        positions: Sequence[int],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Signature:
        if self._made_for is None or self._make is None:
            return self._new_signature(key, positions, args, kwargs)
        self._made_for.check_types(key, args, kwargs)
        return self._make(key)

    def _new_signature(
        self,
        key: Key,
        positions: Sequence[int],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Signature:
        paths = self._paths(positions, args, kwargs)
        specs = self._leaf_specs(positions, args, kwargs)
        self._check_strategies(specs)
        final = []
        for kind, spec, (path, value) in zip(key.types, specs, paths, strict=True):
            is_text = isinstance(spec, str) and spec.strip("() ") != ""  # "()" declares a scalar
            if is_text and isinstance(value, int | np.integer):
                # An expression for a scalar declares it a size; a bool is an int to Python.
                if isinstance(value, bool):
                    raise ArgumentError(f"{path}: a size must be an int, got a bool")
                kind = LeafType(None, True, 1)
            elif isinstance(value, float) and "," not in str(spec) and opens(spec):
                raise ArgumentError(
                    f"{path}: dynamic_axes {spec!r} describes an array, or a size, which is an "
                    f"int; got the float {value!r}, of rank 0"
                )
            final.append(kind)
        names = [path for path, _ in paths]
        fn, sharded = self._config.fn, self._config.sharded
        if sharded is not None:
            fn = on_shards(fn, sharded.axis, sharded.count)
        fn = refusing_mutations(
            key.statics.bind(named_now(fn)), list(map(self._parameters.name, positions))
        )
        given = fn, key.tree, final, names
        constraints = self._config.constraints
        return Signature(
            *given,
            specs,
            constraints,
            learns=self._config.dynamic_axes is None,
            why=why_new(nearest(self._signatures, key), key, names, self._parameters.name),
            traced=TracedPrograms(*given, constraints, pairs=sharded is None),
        )

    def _leaf_specs(
        self, positions: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        spec = self._config.dynamic_axes
        if spec is None:
            return default_entries([*args, *(kwargs[name] for name in sorted(kwargs))])
        every, by_name = self._entries(spec, positions, list(kwargs))
        self._refuse_entries_of_statics(spec, every)
        entries = [every[i] for i in positions]
        pairs = []
        for position, entry, value in zip(positions, entries, args, strict=True):
            pairs += leaf_entries(entry, value, self._parameters.name(position))
        for name in sorted(kwargs):
            pairs += leaf_entries(by_name.get(name), kwargs[name], name)
        return [s for s, _ in pairs]

    def _entries(
        self, spec: object, positions: Sequence[int], keywords: Sequence[str]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The entry of each positional argument, and of each keyword argument by its name."""
        count = positions[-1] + 1 if positions else 0
        return entries_of_arguments(
            *(spec, count, self._parameters.names(count), keywords),
            self._parameters.keyword_only,
        )

    def _refuse_entries_of_statics(self, spec: object, every: Sequence[Any]) -> None:
        names = self._parameters.name
        static = {names(i) for i in self._parameters.static_nums} | self._parameters.static_names
        entries = {names(i): entry for i, entry in enumerate(every)}
        if isinstance(spec, Mapping) and not is_leaf_entry(spec):
            entries.update(spec)
        for name in static & entries.keys():
            if opens(entries[name]):
                raise SpecError(
                    f"dynamic_axes has {entries[name]!r} for {name}, which is static; give None "
                    "there, and an entry for each argument"
                )

    def _check_strategies(self, specs: Sequence[Any]) -> None:
        """Refuse a strategy, plan or policy for a variable that ``dynamic_axes`` does not have."""
        wanted = {
            **dict.fromkeys(self._config.overflow_per_dim, "an overflow policy"),
            **dict.fromkeys(self._config.planned, "a plan"),
            **dict.fromkeys(self._config.per_dim, "a strategy"),
        }
        self.refuse_unknown(wanted, any(isinstance(s, Anonymous) for s in specs))

    def refuse_unknown(self, wanted: Mapping[str, str], unnamed: bool = True) -> None:
        """Refuse what is meant for a dimension variable that the calls cannot have."""
        spec = self._config.dynamic_axes
        words = names_in(spec)
        for dim, what in wanted.items():
            if dim in words or ((unnamed or spec is None) and is_default_name(dim)):
                continue
            if spec is None:
                raise SpecError(
                    f"there is {what} for dimension {dim!r}, but without dynamic_axes the "
                    "dimensions are called batch, axis1, axis2 and so on; name them with "
                    "dynamic_axes, or use these names"
                )
            names = ", ".join(words) or "batch, axis1, axis2 and so on"
            raise SpecError(
                f"there is {what} for dimension {dim!r}, but dynamic_axes {spec!r} has no such "
                f"variable; the variables are {names}"
            )
