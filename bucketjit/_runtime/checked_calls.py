"""Checked execution, for tests: a call is compared with other runs of the same; see `Check`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from bucketjit._compile.build_exact import one_by_one
from bucketjit._compile.executable import Executable, arguments_with, run_poisoned
from bucketjit._config import Check, Out
from bucketjit._errors import is_of_machine
from bucketjit._events import LONGEST, logger, one_line
from bucketjit._masking.checks import POISONS, blame, compare, failed
from bucketjit._masking.rule_context import Rule
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall


class CheckedCall(NamedTuple):
    """A call in a bucket that is to be checked.

    Attributes:
        name: How messages name the function.
        check: What it is compared with.
        rules: Gives the rule table.
        entry: The executable of the bucket.
        signed: The call.
        call: The same, resolved.
        out: The form of its results.
    """

    name: str
    check: Check
    rules: Callable[[], Mapping[Any, Rule]]
    entry: Executable
    signed: SignedCall
    call: ResolvedCall
    out: Out

    def result(
        self,
        counting: AbstractContextManager[None],
        run: Callable[[], Any],
        run_exact: Callable[[], Any],
    ) -> Any:
        """Run it, and compare.

        Args:
            counting: Counts the call.
            run: Runs it in the bucket.
            run_exact: Runs it at its exact shape.

        Raises:
            MaskingError: The results differ.
        """
        if self.check is Check.POISON:
            given = (self.entry, self.signed, self.call)
            with counting:
                results = [run_poisoned(*given, i, self.out) for i in range(len(POISONS))]
            self._compare(results[0], results[1], "the same call with other padding", True)
            return results[0]
        with counting:
            result = run()
        is_known = self.entry.checked and self.check is not Check.EXACT_ALWAYS
        # The whole is compared, and the function may do other things at the size of a part.
        if self.call.whole is None and not is_known:
            self._compare(result, run_exact(), "the unpadded run", False)
        return result

    def _compare(self, result: object, other: object, what: str, to_the_bit: bool) -> None:
        problem = compare(result, other, what, to_the_bit)
        if problem and (to_the_bit or not is_of_jit(self.name, problem, self.signed, result)):
            program = self.call.program
            assert program is not None
            blamed = blame(
                program,
                self.rules(),
                dict(zip(self.call.variables, self.call.ordered, strict=True)),
                self.entry.sizes,
                self.call.size_constants.values,
                lambda kind: arguments_with(self.entry, self.signed, kind),
                not to_the_bit,
            )
            raise failed(self.name, problem, blamed)
        self.entry.checked = True


def check_joined(name: str, signed: SignedCall, result: object, other: object) -> None:
    """Compare the joined results of chunks with those of a run in one piece.

    Raises:
        MaskingError: They differ.
    """
    problem = compare(result, other, "the run in one piece", False)
    if problem and not is_of_jit(name, problem, signed, result):
        raise failed(name, problem, "")


def is_of_jit(name: str, problem: str, signed: SignedCall, result: object) -> bool:
    """Whether it is the compiled unpadded run that is wrong, and the bucket is right.

    Args:
        name: How messages name the function.
        problem: How the two differ, in words.
        signed: The call.
        result: The result of the bucket.
    """
    try:
        want = one_by_one(signed)
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
