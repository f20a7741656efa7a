"""What cannot be masked, and why: programs in any bucket, or in some."""

from __future__ import annotations

from collections.abc import Hashable

from bucketjit._errors import MaskingError
from bucketjit._trace import Program


class Refusals:
    """What building has found out.

    Keys are those of executables: a program, and the padded sizes of its bucket.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, MaskingError] = {}

    def note(self, key: tuple[Program, Hashable], refusal: MaskingError) -> None:
        """Take note that a program cannot be masked in a bucket, or not at all."""
        self._found[key if refusal.in_bucket else key[0]] = refusal.without_frames()

    def of_program(self, program: Program) -> MaskingError | None:
        """Why it cannot be masked in any bucket."""
        return self._found.get(program)

    def of(self, key: tuple[Program, Hashable]) -> MaskingError | None:
        """Why a program cannot be masked in a bucket."""
        return self._found.get(key[0]) or self._found.get(key)

    def clear(self) -> None:
        """Forget all of it."""
        self._found.clear()
