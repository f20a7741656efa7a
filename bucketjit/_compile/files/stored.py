"""The place of an executable among files: make its key, load it, save it.

`StoredMasked` and `StoredExact` turn bytes into an `Executable` and back. The keys' parts come from
`bucketjit._compile.files.keys`, and `bucketjit._compile.files.store` reads and writes the files.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from bucketjit._compile.argument_types import Expected
from bucketjit._compile.executable import Executable, SignatureChanged
from bucketjit._compile.files.environment import environment
from bucketjit._compile.files.executable_files import ExecutableFiles
from bucketjit._compile.files.fingerprint import Digest, NoDigest
from bucketjit._compile.files.keys import (
    device_of,
    kind_of,
    placement_text,
    short_digest,
    type_text,
)
from bucketjit._compile.files.record import Record
from bucketjit._compile.files.store import Store
from bucketjit._compile.kernel import Kernel, with_type_of_counts
from bucketjit._compile.transform import Transform
from bucketjit._ir.jax_patches import forgetful_jax, selecting_jax
from bucketjit._ir.program import Program
from bucketjit._jax.compiler import has_bytes
from bucketjit._jax.config import context_of_keys, looks_for_nans
from bucketjit._jax.devices import device_name
from bucketjit._jax.jaxprs import open_jaxpr, shaped
from bucketjit._jax.serialization import (
    NotPlain,
    Placement,
    cache_hits,
    deserialized,
    loaded_function,
    serialized,
)
from bucketjit._raised import in_one_line, is_of_machine
from bucketjit._tracing.call import Call


class Stored:
    """The place of one executable among the files.

    `save` never raises. `load` raises only what the user's function raises while it is traced.

    Attributes:
        exact: Whether the executable runs unpadded.
    """

    exact: bool

    def __init__(
        self,
        files: ExecutableFiles,
        store: Store,
        call: Call,
        sizes: Mapping[str, int],
        made: Callable[[], Kernel],
    ) -> None:
        self._files = files
        self._store = store
        self._signed = call
        self._sizes = sizes
        self._make = made
        self._wanted: Record | None = None  # its key, once `load` has made it
        self._hits = 0  # of JAX's own cache, before the compile

    @functools.cached_property
    def _made(self) -> Kernel:
        """The function that the executable is compiled from."""
        return self._make()

    def load(self) -> Executable | None:
        """The executable from its file; None if there is no file, or none that can be used."""
        began = time.perf_counter()
        self._hits = cache_hits()
        wanted = self._find_key()
        if wanted is None:
            return None
        try:
            found = self._store.find(wanted)
            if found is None:
                return None
            kept, raw = found
            return self.entry(kept, deserialized(raw, self.placement()), began)
        except Exception as error:
            if not is_of_machine(error):
                self._store.discard(wanted, in_one_line(error))
            return None

    def save(self, entry: Executable) -> None:
        """Write a newly compiled executable to its file; emit an event if that is not possible."""
        wanted = self._wanted
        if wanted is None:
            return
        # A hit means that JAX's own cache had the executable. Then its compile time does not say
        # whether it is worth keeping: JAX keeps only those that took long.
        if cache_hits() != self._hits:
            if not has_bytes(entry.compiled):
                why = "it came from JAX's own cache, and XLA does not write it again as a whole"
                self._files.refuse(self._store, self._sizes, why)
                return
        elif entry.compile_seconds < self._store.min_seconds:
            return
        try:
            # Digest the constants again: a NumPy array that the function closes over may have been
            # written to since the key was made.
            if any(wanted.parts[part] != told for part, told in self.digests().items()):
                raise NoDigest("an array that it closes over was changed meanwhile")
            raw, kept = serialized(entry.compiled, self.placement())
        except (NotPlain, NoDigest) as error:
            self._files.refuse(self._store, self._sizes, str(error))
            return
        except Exception as error:  # saving is optional: the executable can serve the call
            why = f"it cannot be written: {in_one_line(error)}"
            self._files.refuse(self._store, self._sizes, why)
            return
        self._store.keep(wanted._replace(kept=kept, seconds=entry.compile_seconds), raw)

    def _failed(self, error: Exception) -> None:
        """Discard the file of a loaded executable that does not run."""
        if self._wanted is not None:
            self._store.discard(self._wanted, in_one_line(error))

    def _find_key(self) -> Record | None:
        """Make the key. None, and an event, if the executable has no sound key."""
        self.trace()
        try:
            self._wanted = self._key()
        except NoDigest as error:
            self._files.refuse(self._store, self._sizes, str(error))
        except Exception as error:  # files are optional: the call goes on without its key
            why = f"its key cannot be made: {in_one_line(error)}"
            self._files.refuse(self._store, self._sizes, why)
        return self._wanted

    def trace(self) -> None:
        """Trace the function if the key needs that, once. Raises what the call would raise."""

    def _key(self) -> Record:
        """The key: a digest of program, constants, argument types, options and environment."""
        if looks_for_nans():
            raise NoDigest("jax_debug_nans or jax_debug_infs is on")
        device = self.device()
        types = [type_text(x) for x in self.leaves()]
        called = Digest().add(
            self.exact,
            types,
            device_name(device),
            [placement_text(x) for x in self.leaves()],
            list(self._sizes.items()),
            *self.details(),
            self._made.options,
            context_of_keys(),
        )
        parts = {**self.digests(), "call": called.hexdigest()}
        surroundings = environment(device)
        kind = kind_of(self._signed, device)
        return Record(
            identity=kind + short_digest(self.exact, types, list(self._sizes.items())),
            key=Digest().add(parts, repr(sorted(surroundings.items()))).hexdigest(),
            name=self._files.name,
            sizes=dict(self._sizes),
            exact=self.exact,
            parts=parts,
            environment=surroundings,
        )

    def device(self) -> Any:
        """The device that the executable runs on; one of this process if there are several."""
        return device_of(self.leaves())

    def placement(self) -> Placement:
        """Where the executable runs, and where its arguments and results are."""
        return Placement.on(self.device())

    def _checked(self, expected: Expected, args: object, kwargs: object, sizes: object) -> Any:
        """A check of argument types, the same as in the first trace of the function.

        A loaded executable is never traced, so its first call is compared with the types of the
        key.
        """
        expected.check(args, kwargs)
        leaves = jax.tree_util.tree_leaves(sizes)
        known = [(x.shape, x.dtype) for x in map(jax.typeof, leaves)]

        def check(given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            if self.exact:
                expected.check(given, dict(named))
                return
            expected.check(given[1:], dict(named))
            first = map(jax.typeof, jax.tree_util.tree_leaves(given[0]))
            if [(x.shape, x.dtype) for x in first] != known:
                raise SignatureChanged

        return check

    def leaves(self) -> list[Any]:
        """The leaves of the arguments, as types."""
        raise NotImplementedError

    def details(self) -> Sequence[Any]:
        """What the executable depends on besides program, types and options."""
        raise NotImplementedError

    def digests(self) -> Mapping[str, str]:
        """Digests of the program and its constants, by part."""
        raise NotImplementedError

    def entry(self, kept: Sequence[int], xla: object, began: float) -> Executable:
        """The cache entry of a loaded executable."""
        raise NotImplementedError


class StoredMasked(Stored):
    """The place of a bucket's executable. The program is known, so nothing is traced."""

    exact = False

    @property
    def _program(self) -> Program:
        program = self._made.call.program
        assert isinstance(program, Program)
        return program

    @property
    def _transform(self) -> Transform:
        assert self._made.transform is not None
        return self._made.transform

    def leaves(self) -> list[Any]:
        made = self._made
        return jax.tree_util.tree_leaves((made.types, made.kwargs))

    def details(self) -> Sequence[Any]:
        program, made = self._program, self._made
        kinds = [
            None if jax.dtypes.issubdtype(d, jax.dtypes.extended) else (d.name, weak)
            for d, weak in program.out_types
        ]
        return (
            made.call.variables,
            [t.dtype is None for t in self._signed.signature.types],
            sorted(program.lower.items()),
            [tuple(map(str, shape)) for shape in program.out_shapes],
            kinds,
            made.size_constant_shapes,
            sorted(made.donated),
            made.pads,
            program.counts,
            [str(guard) for guard in program.presumed],
            self._transform.details(),
        )

    def digests(self) -> Mapping[str, str]:
        return self._files.digests_of(self._program)

    def entry(self, kept: Sequence[int], xla: object, began: float) -> Executable:
        program, made = self._program, self._made
        outs, tree = with_type_of_counts(program, list(map(shaped, self.results())))
        function, compiled = loaded_function(
            xla,
            kept,
            f"jit({made.function.__name__})",
            [jax.typeof(x) for x in self.leaves()],
            outs,
            tree,
            self.placement(),
            self._checked(made.expected, made.args, made.kwargs, made.sizes),
            made.function,
            self._failed,
        )
        return made.executable(function, compiled, outs, began, loaded=True)

    def results(self) -> list[jax.ShapeDtypeStruct]:
        """The types of the results, without the counts."""
        program, made = self._program, self._made
        assert made.at is not None
        count = self._transform.count
        front = () if count is None else (count,)
        return [
            jax.ShapeDtypeStruct((*front, *made.at.padded_shape(shape)), d, weak_type=weak)
            for shape, (d, weak) in zip(program.out_shapes, program.out_types, strict=True)
        ]


class StoredExact(Stored):
    """The place of the executable of an exact shape. The key needs a trace at that shape."""

    exact = True
    _traced: Any = None  # the trace, once it is made

    def leaves(self) -> list[Any]:
        return jax.tree_util.tree_leaves((self._made.types, self._made.kwargs))

    def details(self) -> Sequence[Any]:
        return (tuple(sorted(self._made.donated)),)

    def trace(self) -> None:
        if self._traced is None:
            with forgetful_jax(), selecting_jax():  # if it fails, JAX must not keep the trace
                self._traced = self._made.function.trace(*self._made.args, **self._made.kwargs)

    def digests(self) -> Mapping[str, str]:
        return self._files.digests(*open_jaxpr(self._traced.jaxpr))

    def entry(self, kept: Sequence[int], xla: object, began: float) -> Executable:
        made = self._made
        tree = jax.tree_util.tree_structure(self._traced.out_info)
        function, compiled = loaded_function(
            xla,
            kept,
            f"jit({made.function.__name__})",
            [jax.typeof(x) for x in self.leaves()],
            list(self._traced.jaxpr.out_avals),
            tree,
            self.placement(),
            self._checked(made.expected, made.args, made.kwargs, ()),
            made.function,
            self._failed,
        )
        return made.executable(function, compiled, self._traced.out_info, began, loaded=True)
