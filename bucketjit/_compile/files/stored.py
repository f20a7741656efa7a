"""The place of an executable among files: make its key, load it, save it.

The key is known from the kernel before anything is masked, lowered or compiled.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from bucketjit._compile.executable import Executable
from bucketjit._compile.files.environment import environment
from bucketjit._compile.files.fingerprint import NoDigest, digest
from bucketjit._compile.files.record import Record
from bucketjit._compile.files.store import ExecutableFiles, Store
from bucketjit._compile.kernel import Kernel, loaded
from bucketjit._ir.jax_patches import forgetful_jax, selecting_jax
from bucketjit._ir.program import Program
from bucketjit._jax.arrays import device_name, is_of_topology, other_memory
from bucketjit._jax.compiler import has_bytes
from bucketjit._jax.config import context_of_keys, looks_for_nans
from bucketjit._jax.fingerprints import text_of
from bucketjit._jax.jaxprs import open_jaxpr
from bucketjit._jax.serialization import (
    ForElsewhere,
    NotPlain,
    Placement,
    cache_hits,
    deserialized,
    serialized,
)
from bucketjit._raised import in_one_line, is_of_machine


class Stored:
    """The place of one executable among the files.

    `save` never raises. `load` raises only what the user's function raises while it is traced.
    """

    _kernel: Kernel  # once `load` has made it

    def __init__(self, files: ExecutableFiles, store: Store) -> None:
        self._files, self._store = files, store
        self._wanted: Record | None = None  # its key, once `load` has made it
        self._hits = 0  # of JAX's own cache, before the compile

    @functools.cached_property
    def _traced(self) -> Any:
        """The trace of an exact shape, which has no program."""
        kernel = self._kernel
        with forgetful_jax(), selecting_jax():  # if it fails, JAX must not keep the trace
            return kernel.function.trace(*kernel.args, **kernel.kwargs)

    def load(self, make: Callable[[], Kernel]) -> Executable | None:
        """The executable from its file; None if there is no file, or none that can be used."""
        began = time.perf_counter()
        self._hits = cache_hits()
        kernel = self._kernel = make()
        if kernel.is_exact:
            _ = self._traced  # raises what the call would raise
        try:
            self._wanted = self._key()
        except Exception as error:  # files are optional: the call goes on without its key
            self._refuse("its key cannot be made", error)
            return None
        try:
            contents = self._files.find(self._store, self._wanted)
            if contents is None:
                return None
            placement = kernel.placement()
            if kernel.is_exact:
                results = list(self._traced.jaxpr.out_avals), self._traced.out_info
            else:
                results = kernel.results()
            if is_of_topology(placement.devices):
                return kernel.executable(
                    kernel.function, ForElsewhere(), results[1], began, loaded=True
                )
            record, raw = contents
            xla = deserialized(raw, placement)
            return loaded(
                kernel, xla, record.kept, results, placement, record.specs, self._failed, began
            )
        except Exception as error:
            if not is_of_machine(error):
                self._failed(error)
            return None

    def save(self, entry: Executable) -> None:
        """Write a newly compiled executable to its file; emit an event if that is not possible."""
        wanted = self._wanted
        if wanted is None:
            return
        # A hit means that JAX's own cache had the executable. Then its compile time does not say
        # whether it is worth keeping: JAX keeps only those that took long.
        if cache_hits() == self._hits and entry.compile_seconds < self._store.min_seconds:
            return
        try:
            if cache_hits() != self._hits and not has_bytes(entry.compiled):
                raise NotPlain("it came from JAX's own cache, and XLA does not write it again")
            # A NumPy array that an exact shape closes over may have been written to since.
            if wanted.program != self._program():
                raise NoDigest("an array that it closes over was changed meanwhile")
            raw, kept, specs = serialized(entry.compiled, self._kernel.placement())
        except Exception as error:  # saving is optional: the executable can serve the call
            self._refuse("it cannot be written", error)
            return
        kept_one = wanted._replace(kept=kept, seconds=entry.compile_seconds, specs=specs)
        self._files.keep(self._store, kept_one, raw)

    def _refuse(self, what: str, error: Exception) -> None:
        is_known = isinstance(error, NotPlain)
        why = str(error) if is_known else f"{what}: {in_one_line(error)}"
        self._files.refuse(self._kernel.bucket, why)

    def _failed(self, error: Exception) -> None:
        """Discard the file of an executable that cannot be loaded, or does not run."""
        if self._wanted is not None:
            self._files.discard(self._store, self._wanted, in_one_line(error))

    def _program(self) -> str:
        program = self._kernel.call.program
        if self._kernel.is_exact:
            return self._files.digest(*open_jaxpr(self._traced.jaxpr))
        assert isinstance(program, Program)
        return self._files.digest_of(program)

    def _key(self) -> Record:
        """The key: a digest of program, constants, argument types, options and environment."""
        if looks_for_nans():
            raise NoDigest("jax_debug_nans or jax_debug_infs is on")
        kernel, program = self._kernel, self._program()
        placement = kernel.placement()
        device = placement.device
        return Record(
            call=digest(
                program,
                [_type_text(x) for x in kernel.leaves],
                _where(placement, kernel),
                list(self._kernel.bucket.items()),
                _details(kernel),
                kernel.options,
                context_of_keys(),
            ),
            program=program,
            name=self._files.name,
            sizes=dict(self._kernel.bucket),
            exact=kernel.is_exact,
            environment=environment(device),
        )


def _details(kernel: Kernel) -> Sequence[Any]:
    """What the executable depends on besides program, types and options."""
    call, program = kernel.call, kernel.call.program
    if kernel.transform is None or not isinstance(program, Program):
        return ["exact", sorted(kernel.donated)]
    kinds = [
        None if jax.dtypes.issubdtype(d, jax.dtypes.extended) else (d.name, weak)
        for d, weak in program.out_types
    ]
    return (
        call.variables,
        [t.dtype is None for t in call.signature.types],
        sorted(program.lower.items()),
        [tuple(map(str, shape)) for shape in program.out_shapes],
        program.roomy,
        kinds,
        kernel.size_constant_shapes,
        sorted(kernel.donated),
        kernel.pads,
        program.counts,
        [str(guard) for guard in program.presumed],
        kernel.transform.details(),
    )


def _where(placement: Placement, kernel: Kernel) -> Any:
    """The device or the mesh, and what the user says of shardings, in words."""
    shardings = kernel.call.signature.shardings
    said = [*map(_spec_text, shardings.leaves), str(jax.tree.map(_spec_text, shardings.results))]
    mesh = placement.mesh
    return device_name(placement.device) if mesh is None else text_of(mesh), said


def _spec_text(sharding: Any) -> str:
    """How a mesh cuts an array, and the memory that it is in if its device uses another one."""
    words = () if sharding is None else (str(getattr(sharding, "spec", "")), other_memory(sharding))
    return " ".join(words).strip()


def _type_text(value: object) -> str:
    """The shape, dtype and weak type of an array, and how it is placed by a mesh.

    An array that is committed to the only device needs no other executable than one that is not.
    """
    aval, placed = jax.typeof(value), _spec_text(getattr(value, "sharding", None))
    return f"{aval.shape} {aval.dtype} {bool(getattr(aval, 'weak_type', False))} {placed}"
