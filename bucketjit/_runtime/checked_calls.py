"""Checked execution, for tests: compare a call with other runs of itself, by `Check`.

`Check.POISON` runs the bucket twice with other padding and compares to the bit. `Check.EXACT` and
`Check.EXACT_ALWAYS` compare with the unpadded run, within rounding. The comparison itself, and the
search for the rule to blame, are in `bucketjit._masking.checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from bucketjit._compile.bodies import one_by_one
from bucketjit._compile.executable import Executable, arguments_with, run_poisoned
from bucketjit._config import Check, Out
from bucketjit._events import LONGEST, logger, one_line
from bucketjit._ir.program import Program
from bucketjit._masking.checks import POISONS, blame, compare, failed
from bucketjit._masking.rule_context import Rule
from bucketjit._raised import is_of_machine
from bucketjit._tracing.call import Call


class CheckedCall(NamedTuple):
    """A call in a bucket that is to be checked.

    Attributes:
        name: Name of the function in messages.
        check: What the call is compared with.
        rules: Returns the table of masking rules.
        entry: The executable of the bucket.
        call: The call.
        call: The same call, resolved.
        out: The form of its results.
    """

    name: str
    check: Check
    rules: Callable[[], Mapping[Any, Rule]]
    entry: Executable
    call: Call
    out: Out

    def result(
        self,
        counting: AbstractContextManager[None],
        run: Callable[[], Any],
        run_exact: Callable[[], Any],
    ) -> Any:
        """Run the call and compare its result."""
        if self.check is Check.POISON:
            given = (self.entry, self.call)
            with counting:
                results = [run_poisoned(*given, i, self.out) for i in range(len(POISONS))]
            self._compare(results[0], results[1], "the same call with other padding", True)
            return results[0]
        with counting:
            result = run()
        # `Check.EXACT` compares the first call of each executable only.
        is_known = self.entry.checked and self.check is not Check.EXACT_ALWAYS
        if not is_known:
            self._compare(result, run_exact(), "the unpadded run", False)
        return result

    def _compare(self, result: object, other: object, what: str, to_the_bit: bool) -> None:
        problem = compare(result, other, what, to_the_bit)
        # Two runs of one executable must agree to the bit, so jit cannot be at fault there.
        if problem and (to_the_bit or not is_of_jit(self.name, problem, self.call, result)):
            program = self.call.program
            assert isinstance(program, Program)
            blamed = blame(
                program,
                self.rules(),
                dict(zip(self.call.variables, self.call.ordered, strict=True)),
                self.entry.sizes,
                self.call.size_constants.values,
                lambda kind: arguments_with(self.entry, self.call, kind),
                not to_the_bit,
            )
            raise failed(self.name, problem, blamed)
        self.entry.checked = True


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
