"""Checked execution, for tests: compare a call with other runs of itself, by `Check`.

`Check.POISON` runs the bucket twice with other padding and compares to the bit. `Check.EXACT` and
`Check.EXACT_ALWAYS` compare with the unpadded run, within rounding. The comparison itself, and the
search for the rule to blame, are in `bucketjit._masking.checks`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from bucketjit._compile.bodies import one_by_one
from bucketjit._compile.executable import Executable, arguments_with, run_poisoned
from bucketjit._config import Check, Out
from bucketjit._events import LONGEST, logger, one_line
from bucketjit._ir.program import Program
from bucketjit._masking.checks import POISONS, blame, compare, failed
from bucketjit._raised import is_of_machine
from bucketjit._tracing.call import Call


def checked(
    engine: Any,
    entry: Executable,
    call: Call,
    out: Out,
    counting: AbstractContextManager[None],
    run: Callable[[], Any],
) -> Any:
    """Run a call of an `Engine` in a bucket, and compare its result."""
    check = engine.config.check
    if check is Check.POISON:
        with counting:
            results = [run_poisoned(entry, call, i, out) for i in range(len(POISONS))]
        _compare(engine, entry, call, results, "the same call with other padding", True)
        return results[0]
    with counting:
        result = run()
    # `Check.EXACT` compares the first call of each executable only.
    if check is Check.EXACT_ALWAYS or not entry.checked:
        results = [result, engine.run_unpadded(call)]
        _compare(engine, entry, call, results, "the unpadded run", False)
    return result


def _compare(
    engine: Any, entry: Executable, call: Call, results: Any, what: str, to_the_bit: bool
) -> None:
    """Raise an error that names the equation to blame if two results differ."""
    result, reference = results
    problem = compare(result, reference, what, to_the_bit)
    # Two runs of one executable must agree to the bit, so jit cannot be at fault there.
    if problem and (to_the_bit or not is_of_jit(engine.name, problem, call, result)):
        assert isinstance(call.program, Program)
        blamed = blame(
            call.program,
            engine.requests.rules(),
            dict(zip(call.variables, call.ordered, strict=True)),
            entry.sizes,
            call.size_constants.values,
            lambda kind: arguments_with(entry, call, kind),
            not to_the_bit,
        )
        raise failed(engine.name, problem, blamed)
    entry.checked = True


def is_of_jit(name: str, problem: str, call: Call, result: object) -> bool:
    """Whether the unpadded run under ``jax.jit`` is wrong and the bucket is right.

    The function runs unpadded once more, one operation at a time; the bucket is right if it agrees
    with that run. Then a warning is logged.
    """
    try:
        want = one_by_one(call)
    except Exception as error:
        if is_of_machine(error):
            raise
        why = one_line(f"{name}: does not run one operation at a time: {error}", LONGEST)
        logger.debug("%s", why)
        return False
    if compare(result, want, "it", False):
        return False
    logger.warning(
        "%s: %s, but agrees with the unpadded run of one operation at a time: XLA rounds a"
        " value in more than one way where jax.jit compiles them together",
        *(one_line(name), one_line(problem, LONGEST)),
    )
    return True
