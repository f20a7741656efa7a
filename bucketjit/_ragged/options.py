"""The options of `BucketedExec.map`, checked."""

from __future__ import annotations

from dataclasses import dataclass

from bucketjit._config import Out, is_positive_int
from bucketjit.errors import SpecError

STACKED = "stacked"
REDUCTIONS = ("sum", "mean")


@dataclass(frozen=True)
class Options:
    """What the user chose for one call of `map`.

    Attributes:
        out: The form of each result.
        is_stacked: Whether the results are stacked to a `Ragged`.
        token_budget: The most padded tokens of a batch; None to choose it from the sizes.
        reduce: How results are reduced; None to return that of each example.
    """

    out: Out
    is_stacked: bool = False
    token_budget: int | None = None
    reduce: str | None = None


def options_of(configured: Out, reduce: object, token_budget: object, out: object) -> Options:
    """Check the options of a call of `map`."""
    if reduce is not None and (not isinstance(reduce, str) or reduce not in REDUCTIONS):
        raise SpecError(f"map: reduce must be 'sum', 'mean' or None, got {reduce!r}")
    budget: int | None = None
    if token_budget is not None:
        if not is_positive_int(token_budget):
            raise SpecError(
                f"map: token_budget must be an int of at least 1, or None, got {token_budget!r}"
            )
        assert isinstance(token_budget, int)
        budget = token_budget
    forms = [form.value for form in Out]
    if out is not None and (not isinstance(out, str) or out not in (*forms, STACKED)):
        raise SpecError(f"map: out must be 'jax', 'numpy', 'padded' or 'stacked', got {out!r}")
    if reduce is not None and out in (STACKED, Out.PADDED.value):
        raise SpecError(f"map: a result that is reduced has no rows; out={out!r} is for rows")
    if out == STACKED:
        form = Out.NUMPY if configured is Out.NUMPY else Out.JAX
        return Options(form, True, budget)
    return Options(configured if out is None else Out(out), False, budget, reduce)
