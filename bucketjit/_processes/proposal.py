"""What a process says of a call before it runs, and what follows from what all processes say."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bucketjit._processes.channel import Messages
from bucketjit.errors import AgreementError


class Kind(enum.Enum):
    """The kinds of proposals."""

    BUCKET = "bucket"  # the call is padded to a bucket
    EXACT = "exact"  # no axis of the call is open
    CANNOT = "cannot"  # the call must run at its exact shape, or not at all
    RAISED = "raised"  # the call has raised, or what makes its arguments
    ENDED = "ended"  # the process has ended
    LATER = "later"  # the call says it, when it comes
    DONE = "done"  # there is no further batch
    LEFT = "left"  # the loop over the batches was left
    READY = "ready"  # the executable is there


@dataclass(frozen=True)
class Proposal:
    """What a process says of a call.

    Attributes:
        kind: Its kind.
        program: A digest of the program, the types and the strategies.
        bucket: The padded size of each variable.
        lost: The executables that all processes had, and that this one has no more.
        why: An error or a reason, in words.
        place: The batch and the number of the call since that batch; ``""`` outside of loops.
    """

    kind: Kind
    program: str = ""
    bucket: Mapping[str, int] = field(default_factory=dict)
    lost: Sequence[str] = ()
    why: str = ""
    place: str = ""

    def text(self) -> str:
        """The proposal as a message."""
        parts = self.kind.value, self.program, self.bucket, self.lost, self.why
        return json.dumps([x if isinstance(x, str) else _plain(x) for x in (*parts, self.place)])

    @classmethod
    def of(cls, text: str) -> Proposal:
        """The proposal of a message."""
        kind, *rest = json.loads(text)
        return cls(Kind(kind), *rest)


def _plain(value: Any) -> Any:
    """A mapping or a sequence as JSON has it."""
    if isinstance(value, Mapping):
        return {name: int(n) for name, n in value.items()}
    return list(value)


class Round(NamedTuple):
    """The proposals of all processes for one call or one batch.

    Attributes:
        noun: What they are for: ``"call"`` or ``"batch"``.
        step: Its number, counted from 1.
        proposals: The proposal of each process; None of one that did not come, or that nobody knows
            because process 0 did not wait for it.
        seconds: How long the others waited.
        unasked: The processes for which nobody waited.
        rank: The index of this process.
    """

    noun: str
    step: int
    proposals: Sequence[Proposal | None]
    seconds: float
    unasked: frozenset[int] = frozenset()
    rank: int = 0

    @classmethod
    def of(cls, noun: str, step: int, messages: Messages, seconds: float, rank: int) -> Round:
        """Read the messages of an exchange."""
        unasked = frozenset(i for i, x in enumerate(messages) if x == "")
        proposals = [Proposal.of(x) if x else None for x in messages]
        return cls(noun, step, proposals, seconds, unasked, rank)

    @property
    def kinds(self) -> set[Kind]:
        """The kinds of the proposals."""
        return {x.kind for x in self.proposals if x is not None}

    def require(self, name: str, *kinds: Kind) -> None:
        """Raise unless all processes have come, with proposals of one of some kinds.

        Args:
            name: The name of the function.
            *kinds: The kinds.

        Raises:
            AgreementError: A process is missing, or proposes something else.
        """
        wrong = {
            i: self._told(i, proposal)
            for i, proposal in enumerate(self.proposals)
            if (proposal is None or proposal.kind not in kinds) and i not in self.unasked
        }
        if not wrong:
            return
        late = f"it may be slower than timeout={self.seconds:g}, hang, or have left out a call"
        remedy = late if None in [self.proposals[i] for i in wrong] else EQUAL_CALLS
        remedy = next((text for kind, text in _REMEDIES.items() if kind in self.kinds), remedy)
        raise self.error(name, wrong, remedy)

    def error(self, name: str, told: Mapping[int, str], remedy: str) -> AgreementError:
        """The error for processes that do not agree.

        Args:
            name: The name of the function.
            told: What the processes did that do not do what the others do.
            remedy: What to do.
        """
        every = "; ".join(f"process {i} {did}" for i, did in sorted(told.items()))
        if len(told) == len(self.proposals) > 1 and len(set(told.values())) == 1:
            every = f"every process {next(iter(told.values()))}"
        return AgreementError(
            f"{name}, {self.noun} {self.step}: {every}. No process runs this {self.noun}: {remedy}",
            self.step,
            dict(told),
        )

    def _told(self, process: int, proposal: Proposal | None) -> str:
        """What a process did, in words."""
        if proposal is None:
            if process == self.rank:
                return "came when the others had given up waiting for it"
            return f"did not come within {self.seconds:g} s"
        match proposal.kind:
            case Kind.CANNOT:
                return f"cannot pad its call: {proposal.why.rstrip('.')}"
            case Kind.RAISED:
                return f"raised {proposal.why.rstrip('.')}"
            case Kind.ENDED:
                return f"has ended with {proposal.why}" if proposal.why else "has ended"
            case Kind.DONE:
                return "has no further batch"
            case Kind.LEFT:
                return "has left the loop over its batches"
            case Kind.EXACT:
                return "makes a call in which no axis is open"
            case Kind.BUCKET | Kind.LATER | Kind.READY:
                return "makes another call"

    def bucket(self) -> dict[str, int]:
        """The largest bucket of each variable."""
        return _largest([x.bucket for x in self.proposals if x is not None])

    def lost(self) -> set[str]:
        """The executables that a process has no more."""
        return {name for x in self.proposals if x is not None for name in x.lost}


EQUAL_CALLS = "every process must make the same calls in the same order"
_REMEDIES: Mapping[Kind, str] = {
    Kind.CANNOT: (
        "processes run a call together only if all of them can pad it; see explain() on the "
        "process that is named"
    ),
    Kind.DONE: "give every process the same number of batches",
    Kind.RAISED: "mend the error on the process that is named",
    Kind.ENDED: EQUAL_CALLS,
}


def _largest(every: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The largest value of each name, in the order of the first mapping."""
    found: dict[str, int] = {}
    for mapping in every:
        for name, n in mapping.items():
            found[name] = max(n, found.get(name, 0))
    return found
