"""Writes down as JSON what was compiled, so that another process can warm up the same.

`written_arguments` writes and reads the arguments.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bucketjit._autodiff.derivatives import Derived
from bucketjit._compile.executable import Executable, Origin
from bucketjit._jax.devices import default_device
from bucketjit._persistence import files
from bucketjit._persistence.environment import environment
from bucketjit._persistence.fingerprint import NoDigest
from bucketjit._persistence.store import environment_changes, part_changes
from bucketjit._precompile.written_arguments import (
    CannotWrite,
    DerivativeOf,
    NotHere,
    read_arguments,
    read_derivative,
    read_sizes,
    read_text,
    read_texts,
    written_arguments,
    written_derivative,
)
from bucketjit._runtime.engine import Engine
from bucketjit._signature.signer import SignedCall
from bucketjit._tracing.program import Program
from bucketjit.errors import SpecError

_FORMAT = 1


class Entry(NamedTuple):
    """Calls of one signature to warm up.

    Attributes:
        args: Positional arguments: ``jax.ShapeDtypeStruct`` for arrays, at the first of the sizes.
        kwargs: Keyword arguments, likewise.
        sizes: Logical sizes of the dimension variables, one mapping for each bucket; empty if the
            call has no open axes.
        fingerprint: Digests of the program and its constants; None if the call runs exact or they
            have no digest.
        problem: Why ``args`` and ``kwargs`` are empty: they need something that this process does
            not have, such as a device. None if they could be made.
        derivative: The derivative that is called; None for the function itself.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sizes: tuple[Mapping[str, int], ...]
    fingerprint: Mapping[str, str] | None
    problem: str | None = None
    derivative: DerivativeOf | None = None


@dataclass(frozen=True)
class Manifest:
    """What a bucketed function has compiled. `BucketedExec.manifest` makes one.

    Attributes:
        function: Name of the function.
        environment: Versions, device and flags of the process that made it.
        signatures: What was compiled, as JSON values: ``args`` and ``kwargs`` (trees of arrays by
            dtype, shape and sharding), ``variables``, ``buckets`` (each with the ``sizes`` of the
            call that first needed it), ``fingerprint``, ``exact``, and ``derivative`` (how it is
            made, and the arguments of the function it is a derivative of; null for the function).
        left_out: What cannot be written down, and why.

    Examples:
        >>> import numpy as np
        >>> from bucketjit import BucketedExec
        >>> double = BucketedExec(lambda x: 2 * x).with_pow2()
        >>> _ = double(np.ones((3, 2), np.float32)), double(np.ones((7, 2), np.float32))
        >>> manifest = Manifest.parse(double.manifest().text())
        >>> [entry] = manifest.entries()
        >>> [dict(sizes) for sizes in entry.sizes], entry.args[0].dtype.name
        ([{'batch': 3}, {'batch': 7}], 'float32')
        >>> manifest.changes()  # the same versions, device and flags
        []
    """

    function: str
    environment: Mapping[str, str]
    signatures: tuple[Mapping[str, Any], ...]
    left_out: tuple[str, ...] = ()

    def text(self) -> str:
        """The manifest as JSON."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the manifest to a file, atomically: readers see the old or the new content.

        A symbolic link is followed. Something else than a file, such as a pipe, is written to.

        Args:
            path: The file.

        Raises:
            OSError: The file cannot be written.
        """
        place, text = Path(path).absolute(), self.text().encode()
        if place.exists() and not place.is_file():
            place.write_bytes(text)
        else:
            files.write(Path(os.path.realpath(place)), text, is_private=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Manifest:
        """Read a manifest from a file.

        Args:
            path: The file.

        Returns:
            The manifest.

        Raises:
            SpecError: The file is no manifest, or damaged.
            OSError: The file cannot be read.
        """
        try:
            return cls.parse(Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            raise SpecError(f"{path} is no manifest: it is not text") from None
        except SpecError as error:
            raise SpecError(f"{path} is no manifest: {error}") from None

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """Read a manifest from JSON. Nothing in it is run or imported.

        Args:
            text: The JSON.

        Returns:
            The manifest.

        Raises:
            SpecError: The text is no manifest.
        """
        try:
            given = json.loads(text)
        except ValueError as error:
            raise SpecError(f"not JSON ({error})") from None
        except RecursionError:
            raise SpecError("its JSON is nested too deeply") from None
        if not isinstance(given, dict) or given.get("format") != _FORMAT:
            raise SpecError(f"expected an object with 'format': {_FORMAT}")
        try:
            made = cls(
                read_text("function", given["function"]),
                read_texts("environment", given["environment"]),
                tuple(given["signatures"]),
                tuple(read_text("left_out", why) for why in given["left_out"]),
            )
            list(made.entries())
        except SpecError:
            raise
        except Exception as error:
            raise SpecError(f"its fields are not as expected: {error!r}") from None
        return made

    def entries(self) -> list[Entry]:
        """The calls to warm up: their arguments, and the sizes for each bucket.

        Returns:
            An entry for each signature.

        Raises:
            SpecError: A field is not as expected.
        """
        return [_entry(signature) for signature in self.signatures]

    def changes(self) -> list[str]:
        """Compare the process that made the manifest with this one.

        If anything differs, executables in files are not found again, and warming up compiles.

        Returns:
            What differs in versions, device and flags, in words.
        """
        return environment_changes(self.environment, environment(default_device()))


def manifest_of(engine: Engine, derivatives: Iterable[Derived]) -> Manifest:
    """The manifest of what the cache of an engine holds."""
    # An executable belongs to the function or to a derivative by the signature of its origin.
    owners: dict[int, Derived | None] = dict.fromkeys(map(id, engine.signer.signatures()))
    for made in derivatives:
        owners |= dict.fromkeys(map(id, made.engine.signer.signatures()), made)
    groups: dict[Any, list[tuple[Origin, Executable, Any]]] = {}
    left_out: list[str] = []
    for key, entry in engine.cache.items():
        origin = entry.origin
        if entry.rows is not None:
            left_out.append(f"{dict(entry.sizes)}: a batch of map; warmup(rows=...) compiles it")
            continue
        if origin is None or id(origin.signed.signature) not in owners:
            left_out.append(f"{dict(entry.sizes)}: where it comes from is not known")
            continue
        # Buckets of one program may be for calls with arrays on other devices: another signature.
        placed = tuple(getattr(x, "sharding", None) for x in origin.signed.leaves)
        group = key[0], entry.exact, origin.tokens, placed
        groups.setdefault(group, []).append((origin, entry, key[0]))
    signatures = []
    for members in groups.values():
        derived = owners[id(members[0][0].signed.signature)]
        # An exact shape has no open axes, so each one is a signature.
        parts = [[m] for m in members] if members[0][1].exact else [members]
        for part in parts:
            try:
                signatures.append(_signature(engine, derived, part))
            except CannotWrite as error:
                left_out.append(str(error))
    name = engine.name
    surroundings = dict(environment(default_device()))
    return Manifest(name, surroundings, tuple(signatures), tuple(dict.fromkeys(left_out)))


def changes_of(
    engine: Engine, signed: SignedCall, fingerprint: Mapping[str, str] | None
) -> list[str]:
    """Compare the program of a call with the fingerprint in a manifest."""
    if fingerprint is None or engine.config.always_exact:
        return []
    program = engine.resolve(signed).program
    if not isinstance(program, Program):
        return ["the call has no program that is masked"]
    try:
        return part_changes(fingerprint, engine.requests.files.digests_of(program))
    except NoDigest as error:
        return [f"its program cannot be compared: {error}"]


def _signature(
    engine: Engine, derived: Derived | None, members: Sequence[tuple[Origin, Executable, Any]]
) -> dict[str, Any]:
    origin, entry, program = members[0]
    fingerprint = None
    if not entry.exact:
        try:
            fingerprint = dict(engine.requests.files.digests_of(program))
        except NoDigest:
            fingerprint = None
    return {
        **written_arguments(origin),
        "buckets": [{"bucket": dict(e.sizes), "sizes": dict(o.sizes)} for o, e, _ in members],
        "fingerprint": fingerprint,
        "exact": entry.exact,
        "derivative": None if derived is None else written_derivative(engine, derived),
    }


def _entry(signature: Mapping[str, Any]) -> Entry:
    variables = signature["variables"]
    sizes = tuple(read_sizes(bucket["sizes"], variables) for bucket in signature["buckets"])
    fingerprint = signature["fingerprint"]
    if fingerprint is not None:
        fingerprint = read_texts("fingerprint", fingerprint)
    asked = sizes if variables else ()
    try:
        args, kwargs = read_arguments(signature, sizes[0] if sizes else {})
        derivative = read_derivative(signature["derivative"])
    except NotHere as error:
        return Entry((), {}, asked, fingerprint, str(error))
    return Entry(args, kwargs, asked, fingerprint, derivative=derivative)
