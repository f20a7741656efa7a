"""Run one generated program: masked agrees with exact, or masking is refused with a reason."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from bucketjit._ir.expressions import evaluate_text
from bucketjit.errors import MaskingError
from tests.generated.programs import Generated
from tests.harness import check

AGREES, REFUSED, INVALID, FAILED = "agrees", "refused", "invalid", "failed"


@dataclass(frozen=True)
class Verdict:
    """What came of a program.

    Attributes:
        kind: ``agrees``; ``refused`` with a reason; ``invalid``, as the plain run fails at these
            sizes; ``failed``.
        message: The reason, or what went wrong.
        error: The exception.
    """

    kind: str
    message: str = ""
    error: Exception | None = None


def verdict(program: Generated, paired: bool = False) -> Verdict:
    """Run a program padded and exact; ``paired`` makes it of concrete traces."""
    try:
        check(program.case(), poisons=("nan", "lowest"), paired=paired)
        check(program.case(), poisoned=False, paired=paired)  # what padding holds is known then
    except Exception as error:
        if isinstance(error, MaskingError) and "defect of" not in error.remedy:
            return Verdict(REFUSED, error.reason.split(" [")[0])
        if not _is_valid(program):
            return Verdict(INVALID)
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return Verdict(FAILED, f"{type(error).__name__}: {' | '.join(lines[:8])}", error)
    return Verdict(AGREES)


def _is_valid(program: Generated) -> bool:
    """Whether the plain run takes these sizes (symbolic tracing does not check a reshape)."""

    def shapes(sizes: dict[str, int]) -> list[Any]:
        return [
            jax.ShapeDtypeStruct(
                tuple(evaluate_text(t, sizes) for t in arg.sizes), jnp.dtype(arg.dtype)
            )
            for arg in program.args
        ]

    fn: Callable[..., Any] = program.function()
    try:
        for sizes in program.sizes:
            jax.eval_shape(fn, *shapes(sizes))
    except Exception:
        return False
    return True
