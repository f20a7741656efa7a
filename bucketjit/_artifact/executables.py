"""Compile the buckets of a file that is being written, and add the executables to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bucketjit._artifact.archive import EXECUTABLES, Contents
from bucketjit._artifact.manifest import Bucket, Manifest
from bucketjit._artifact.saved_engine import LoadedFunction
from bucketjit._artifact.saved_executables import environment_digest
from bucketjit._artifact.saved_program import LoadedProgram, Source
from bucketjit._compile.files.keys import device_of
from bucketjit._events import shown
from bucketjit._jax.serialization import NotPlain, Placement, serialized
from bucketjit._runtime.decisions import Masked
from bucketjit._runtime.engine import Engine
from bucketjit._signature.structs import sign_like
from bucketjit.errors import ArtifactError


class _Unwritten:
    """The members of a file that is not written yet, as `Source` reads those of one that is."""

    def __init__(self, path: Path, manifest: Manifest, contents: Mapping[str, Contents]) -> None:
        self.path, self.manifest, self._contents = path, manifest, contents

    def read(self, name: str) -> bytes:
        return bytes(self._contents[name]())

    def view(self, name: str) -> memoryview:
        return memoryview(self._contents[name]())

    def close(self) -> None:
        pass


def with_executables(
    path: Path,
    manifest: Manifest,
    contents: Mapping[str, Contents],
    add: Callable[[str, bytes], str],
) -> Manifest:
    """Compile every bucket of a file, and add the executables for this machine.

    They are compiled from the modules as a process compiles them that loads the file.
    """
    source = Source(_Unwritten(path, manifest, contents), trusted=True)
    functions = []
    for order, record in enumerate(manifest.functions):
        function = LoadedFunction(source, record)
        engine = function.engine(function.config())
        programs = []
        for number, program in enumerate(record.programs):
            where = f"{EXECUTABLES}{order}-{number}"
            own = function.programs[number]
            buckets = tuple(_compiled(engine, function, own, where, add))
            programs.append(dataclasses.replace(program, buckets=buckets))
        functions.append(dataclasses.replace(record, programs=tuple(programs)))
    return dataclasses.replace(manifest, functions=tuple(functions))


def _compiled(
    engine: Engine,
    function: LoadedFunction,
    program: LoadedProgram,
    where: str,
    add: Callable[[str, bytes], str],
) -> Iterator[Bucket]:
    """The buckets of a program, each with its executable."""
    for bucket in program.record.buckets:
        args, kwargs = function.like(bucket.sizes)
        signed = sign_like(engine.signer, args, kwargs)
        call = engine.resolve(signed)
        if program.presumed and program.admits(call.sizes):  # others may serve the same sizes
            call = dataclasses.replace(call, program=program)
        decision = engine.decide(signed, call)
        # A guard may keep the sizes of the bucket themselves from its program.
        if not isinstance(decision, Masked) or dict(decision.bucket) != dict(bucket.sizes):
            yield bucket
            continue
        entry = engine.requests.masked(signed, call, decision.bucket).build()
        device = device_of(signed.leaves)
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
        yield dataclasses.replace(bucket, executables=found)
