"""Compile the buckets of a file that is being written, and add the executables to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from bucketjit._artifact.archive import EXECUTABLES, Archive
from bucketjit._artifact.manifest import Bucket, Manifest
from bucketjit._artifact.saved_engine import LoadedFunction
from bucketjit._artifact.saved_executables import environment_digest
from bucketjit._artifact.saved_program import LoadedProgram, Source
from bucketjit._compile.files.keys import device_of
from bucketjit._events import shown
from bucketjit._jax.serialization import NotPlain, Placement, serialized
from bucketjit._runtime.engine import Engine
from bucketjit._tracing.resolution import Resolution
from bucketjit.errors import ArtifactError


def with_executables(archive: Archive, add: Callable[[str, bytes], str]) -> Manifest:
    """Compile every bucket of a file, and add the executables for this machine.

    They are compiled from the modules as a process compiles them that loads the file.
    """
    source, functions = Source(archive, trusted=True), []
    for order, record in enumerate(archive.manifest.functions):
        function = LoadedFunction(source, record)
        engine, programs = function.engine(), []
        for number, program in enumerate(function.programs):
            where = f"{EXECUTABLES}{order}-{number}"
            buckets = [
                _compiled(engine, function, program, bucket, where, add)
                for bucket in program.record.buckets
            ]
            programs.append(dataclasses.replace(program.record, buckets=tuple(buckets)))
        functions.append(dataclasses.replace(record, programs=tuple(programs)))
    return dataclasses.replace(archive.manifest, functions=tuple(functions))


def _compiled(
    engine: Engine,
    function: LoadedFunction,
    program: LoadedProgram,
    bucket: Bucket,
    where: str,
    add: Callable[[str, bytes], str],
) -> Bucket:
    """A bucket with its executable."""
    args, kwargs = function.like(bucket.sizes)
    call = engine.signer.sign(args, kwargs, structs=True)
    sizes = {v: n for v, n in bucket.sizes.items() if v not in program.unfitted}
    constants = program.size_constants(sizes)
    if constants is None:  # a guard keeps these sizes from the program
        return bucket
    tokens = function.tokens_of(program)
    call = call.resolved(Resolution(tokens, sizes, program, size_constants=constants))
    entry = engine.requests.masked(call, bucket.sizes).build()
    device = device_of(call.leaves)
    try:
        raw, kept = serialized(entry.compiled, Placement.on(device))
    except NotPlain as error:
        raise ArtifactError(
            f"the executable of {shown(bucket.sizes)} cannot be saved: {error}; save without "
            "executables=True"
        ) from error
    name = f"{where}/{','.join(f'{v}={n}' for v, n in bucket.sizes.items())}"
    digest = environment_digest(device)
    found = {digest: (add(f"{name}-{digest[:8]}.bin", raw), kept)}
    return dataclasses.replace(bucket, executables=found)
