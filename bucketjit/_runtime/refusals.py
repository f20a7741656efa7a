"""What cannot be masked, and why: programs in any bucket, or in some."""

from __future__ import annotations

import weakref
from collections.abc import Hashable

from bucketjit._errors import MaskingError
from bucketjit._tracing.program import Program


class Refusals:
    """What building has found out.

    Keys are those of executables: a program, and the padded sizes of its bucket.
    """

    def __init__(self) -> None:
        # By the padded sizes of a bucket; None stands for all buckets.
        self._found: weakref.WeakKeyDictionary[Program, dict[Hashable, MaskingError]]
        self._found = weakref.WeakKeyDictionary()

    def note(self, key: tuple[Program, Hashable], refusal: MaskingError) -> None:
        """Take note that a program cannot be masked in a bucket, or not at all."""
        program, bucket = key
        at = bucket if refusal.in_bucket else None
        self._found.setdefault(program, {})[at] = refusal.without_frames()

    def of_program(self, program: Program) -> MaskingError | None:
        """Why it cannot be masked in any bucket."""
        return self._found.get(program, {}).get(None)

    def of(self, key: tuple[Program, Hashable]) -> MaskingError | None:
        """Why a program cannot be masked in a bucket."""
        program, bucket = key
        found = self._found.get(program, {})
        return found.get(None) or found.get(bucket)

    def clear(self) -> None:
        """Forget all of it."""
        self._found.clear()
