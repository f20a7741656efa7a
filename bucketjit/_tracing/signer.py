"""Find the signature of a call: flatten its arguments, type them, and look the signature up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bucketjit._config import Config
from bucketjit._ir import dynamic_axes
from bucketjit._ir.expressions import is_symbolic
from bucketjit._ir.interface import Interface
from bucketjit._jax.arrays import is_of_topology, names_of
from bucketjit._jax.config import trace_context
from bucketjit._jax.patches.patch import named_now
from bucketjit._tracing.axis_guesses import default_entries, is_default_name
from bucketjit._tracing.call import Call
from bucketjit._tracing.leaf_types import LeafType, leaf_type, remedy_for, with_paths
from bucketjit._tracing.parameters import Key, Parameters, Static
from bucketjit.errors import ArgumentError, SpecError

if TYPE_CHECKING:
    from bucketjit._tracing.made_for import MadeFor
    from bucketjit._tracing.shards import Shardings
    from bucketjit._tracing.signature import Signature


class Signer:
    """Finds or makes the signature of each call. Safe to use from several threads."""

    def __init__(
        self,
        config: Config,
        made_for: MadeFor | None = None,
        make: Callable[[Key], Signature] | None = None,
    ) -> None:
        self._config, self.fn = config, config.fn
        self._made_for, self._make = made_for, make
        self.parameters = Parameters(
            config.fn, config.static_argnums, config.static_argnames, config.donate_argnums
        )
        self._signatures: dict[Key, Signature] = {}
        self._placed: dict[Any, Shardings] = {}
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forget every signature."""
        with self._lock:
            self._signatures.clear()
            self._placed.clear()

    def signatures(self) -> list[Signature]:
        """The signatures so far."""
        with self._lock:
            return list(self._signatures.values())

    def release(self, program: Interface) -> None:
        """Drop the reference to a program, see `Signature.release`."""
        for signature in self.signatures():
            signature.release(program)

    def sign(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, structs: bool = False
    ) -> Call:
        """Flatten the arguments of a call and find their signature.

        With ``structs``, a ``jax.ShapeDtypeStruct`` may describe an array.
        """
        positional, keywords, statics = self.parameters.split(args, kwargs)
        positions = self.parameters.dynamic_positions(len(args))
        leaves, tree = jax.tree_util.tree_flatten((positional, keywords))
        try:
            pairs = [leaf_type(x, "", structs=structs) for x in leaves]
        except ArgumentError:
            pairs = []
        if len(pairs) < len(leaves):  # outside of the `except` block: a better error has no context
            (self._made_for or self.parameters).check_call(args, kwargs)
            # Paths take long to make, so only an error has them.
            names, values = self._named(positional, keywords)
            remedy, named = remedy_for(values), with_paths(names, values)
            pairs = [leaf_type(x, path, remedy, structs=structs) for path, x in named]
        types, shapes = tuple(kind for kind, _ in pairs), [shape for _, shape in pairs]
        context, shardings = trace_context(), None
        if self._config.shardings:
            shardings = self._shardings(tree, context, positional, keywords)
            types = shardings.without_parts(types)
        key = Key(tree, types, statics, context)
        # Most calls find their signature without the lock; a miss is checked again under it.
        signature = self._signatures.get(key)
        if signature is None:
            with self._lock:
                if key not in self._signatures:
                    self._signatures[key] = self._new(key, positional, keywords, shardings)
                signature = self._signatures[key]
        if not structs and signature.target is not None:
            raise ArgumentError(
                f"arguments are put on {signature.device} of a topology, where nothing can run; "
                "lower, warmup and explain take them"
            )
        if self._made_for is not None:
            leaves = self._made_for.checked(leaves, shapes)
        typed = zip(leaves, shapes, signature.types, strict=True)
        shapes = [(int(x),) if kind.dtype is None else shape for x, shape, kind in typed]
        donated = self.parameters.donated
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
        return self.parameters.name(position)

    def is_static(self, name: int | str) -> bool:
        """Whether an argument is static, given by its position or its name."""
        nums, names = self.parameters.static_nums, self.parameters.static_names
        return name in (nums if isinstance(name, int) else names)

    def arguments_with_open_axes(
        self, count: int, keywords: Sequence[str]
    ) -> tuple[set[int], set[str]] | None:
        """The arguments whose entry in ``dynamic_axes`` opens an axis, or names a size."""
        if self._made_for is not None:
            return self._made_for.opened(count, keywords)
        if self._config.dynamic_axes is None:
            return None
        positions = self.parameters.dynamic_positions(count)
        named = [k for k in keywords if k not in self.parameters.static_names]
        every, by_name = self._entries(positions, named)
        opened = {i for i in positions if dynamic_axes.opens(every[i])}
        return opened, {k for k in named if dynamic_axes.opens(by_name.get(k))}

    def sizes_among(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> frozenset[int | str]:
        """The places and names of the Python ints that ``dynamic_axes`` says are sizes."""
        pairs: tuple[tuple[int | str, Any], ...] = (*enumerate(args), *kwargs.items())
        ints = {place for place, x in pairs if _is_number(x)}
        opened = self.arguments_with_open_axes(len(args), list(kwargs)) if ints else None
        return frozenset(ints & {*opened[0], *opened[1]} if opened else ())

    def changed(
        self, change: Callable[[Any], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with each leaf changed of those that are not static."""

        def of(name: int | str, value: Any) -> Any:
            if self.is_static(name):
                return value
            return jax.tree.map(change, value, is_leaf=lambda x: isinstance(x, Static))

        return tuple(of(i, x) for i, x in enumerate(args)), {
            k: of(k, kwargs[k]) for k in sorted(kwargs)
        }

    def with_static_sizes(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call; the numbers that ``dynamic_axes`` calls sizes are `Static`."""
        positional, keywords, _ = self.parameters.split(args, kwargs)
        leaves = jax.tree_util.tree_leaves((positional, keywords))
        if self._config.dynamic_axes is None or not any(map(_is_number, leaves)):
            return args, dict(kwargs)
        named = self._named(positional, keywords)
        specs = iter(self._leaf_specs(len(positional), *named))

        def held(leaf: Any) -> Any:
            is_size = _is_expression(next(specs)) and _is_number(leaf)
            return Static(leaf if is_symbolic(leaf) else int(leaf)) if is_size else leaf

        return self.changed(held, args, kwargs)

    def _named(
        self, positional: Sequence[Any], keywords: Mapping[str, Any]
    ) -> tuple[list[str], list[Any]]:
        names = [*map(self.parameters.name_of_dynamic, range(len(positional))), *sorted(keywords)]
        return names, [*positional, *(keywords[k] for k in sorted(keywords))]

    def _shardings(
        self, tree: Any, context: Any, positional: Sequence[Any], keywords: Mapping[str, Any]
    ) -> Shardings:
        from bucketjit._tracing.shards import shardings_of

        shardings = self._placed.get((tree, context))  # another thread may clear the table
        if shardings is None:
            shardings = shardings_of(self._config, positional, keywords)
            self._placed[tree, context] = shardings
        return shardings

    def _new(
        self,
        key: Key,
        positional: Sequence[Any],
        keywords: Mapping[str, Any],
        shardings: Shardings | None,
    ) -> Signature:
        if self._made_for is not None and self._make is not None:
            self._made_for.check_types(key, positional, keywords)
            return self._make(key)
        from bucketjit._tracing.mutations import refusing_mutations
        from bucketjit._tracing.signature import Signature

        names, values = self._named(positional, keywords)
        paths = with_paths(names, values)
        specs = self._leaf_specs(len(positional), names, values)
        self._check_strategies(specs)
        final = []
        for kind, spec, (path, value) in zip(key.types, specs, paths, strict=True):
            if _is_expression(spec) and isinstance(value, int | np.integer):
                # An expression for a scalar declares it a size; a bool is an int to Python.
                if isinstance(value, bool):
                    raise ArgumentError(f"{path}: a size must be an int, got a bool")
                kind = LeafType(None, True, 1)
            elif isinstance(value, float) and "," not in str(spec) and dynamic_axes.opens(spec):
                raise ArgumentError(
                    f"{path}: dynamic_axes {spec!r} describes an array, or a size, which is an "
                    f"int; got the float {value!r}, of rank 0"
                )
            final.append(kind)
        _check_devices([path for path, _ in paths], final)
        fn, sharded = self._config.fn, self._config.sharded
        if sharded is not None:
            from bucketjit._tracing.shards import on_shards

            fn = on_shards(fn, sharded.axis, sharded.count)
        fn = refusing_mutations(key.statics.bind(named_now(fn)), names)
        leaves, why = [path for path, _ in paths], "new"
        if self._signatures:
            from bucketjit._tracing.made_for import why_new

            why = why_new(self._signatures, key, self.parameters)
        signature = Signature(
            *(fn, key.tree, final, leaves, specs, self._config.constraints),
            learns=self._config.dynamic_axes is None,
            why=why,
            pairs=sharded is None,
            has_room=self._config.has_room,
            shardings=shardings,
        )
        if sharded is not None and is_of_topology(sharded.mesh.devices.flat):
            signature.target = NamedSharding(sharded.mesh, PartitionSpec(sharded.axis))
        return signature

    def _leaf_specs(self, count: int, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
        """The entry of each leaf; the first ``count`` arguments are given by position."""
        spec = self._config.dynamic_axes
        if spec is None:
            return default_entries(values)
        positions, keywords = self.parameters.first_dynamic(count), names[count:]
        every, by_name = self._entries(positions, keywords)
        self._refuse_entries_of_statics(spec, every)
        entries = [*(every[i] for i in positions), *map(by_name.get, keywords)]
        rows = zip(entries, values, names, strict=True)
        return [leaf for row in rows for leaf in dynamic_axes.leaf_entries(*row)]

    def _entries(
        self, positions: Sequence[int], keywords: Sequence[str]
    ) -> tuple[list[Any], dict[str, Any]]:
        spec, count = self._config.dynamic_axes, positions[-1] + 1 if positions else 0
        names = self.parameters.names(count)
        return dynamic_axes.entries_of_arguments(
            spec, count, names, keywords, self.parameters.keyword_only
        )

    def _refuse_entries_of_statics(self, spec: object, every: Sequence[Any]) -> None:
        names = self.parameters.name
        static = {names(i) for i in self.parameters.static_nums} | self.parameters.static_names
        entries = {names(i): entry for i, entry in enumerate(every)}
        if isinstance(spec, Mapping) and not dynamic_axes.is_leaf_entry(spec):
            entries.update(spec)
        for name in static & entries.keys():
            if dynamic_axes.opens(entries[name]):
                raise SpecError(
                    f"dynamic_axes has {entries[name]!r} for {name}, which is static; give None "
                    "there, and an entry for each argument"
                )

    def _check_strategies(self, specs: Sequence[Any]) -> None:
        """Refuse a strategy or policy for a variable that ``dynamic_axes`` does not have."""
        wanted = {
            **dict.fromkeys(self._config.overflow_per_dim, "an overflow policy"),
            **dict.fromkeys(self._config.per_dim, "a strategy"),
        }
        self.refuse_unknown(wanted, any(isinstance(s, dynamic_axes.Anonymous) for s in specs))

    def refuse_unknown(self, wanted: Mapping[str, str], unnamed: bool = True) -> None:
        """Refuse what is meant for a dimension variable that the calls cannot have."""
        spec = self._config.dynamic_axes
        words = dynamic_axes.names_in(spec)
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


def _check_devices(paths: Sequence[str], types: Sequence[LeafType]) -> None:
    placed = [(p, k.target.device_set) for p, k in zip(paths, types, strict=True) if k.target]
    for path, devices in placed:
        if devices != placed[0][1]:
            raise ArgumentError(
                f"{path} is on {names_of(devices)}, and {placed[0][0]} on "
                f"{names_of(placed[0][1])}: arguments of a call must be on the same devices, "
                "and a topology is described once"
            )


def _is_expression(spec: object) -> bool:
    """Whether an entry of a number says that it is a size; ``"()"`` declares a scalar."""
    return isinstance(spec, str) and spec.strip("() ") != ""


def _is_number(value: object) -> bool:
    """Whether a leaf is a number that ``dynamic_axes`` may call a size."""
    is_int = isinstance(value, int | np.integer) and type(value) is not bool
    return is_int or is_symbolic(value)
