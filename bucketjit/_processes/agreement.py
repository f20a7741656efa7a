"""Calls that all processes of a job make in the same bucket.

    process 0    sign, resolve, decide    b=8  ┐                     ┌ b=16    run
    process 1    sign, resolve, decide    b=16 ┘ gather, the largest └ b=16    run

Nothing that is known to one process alone decides what it runs: no larger bucket takes the place of
the agreed one, and the first call of a bucket begins only when all processes have its executable.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from bucketjit._compile.executable import Executable, SignatureChanged
from bucketjit._config import Agreed, Check, is_int_from
from bucketjit._events import shown
from bucketjit._jax.arrays import NotPlaced
from bucketjit._jax.coordination import StoreLost
from bucketjit._processes.identity import described, differences, digest_of_call
from bucketjit._processes.job import Job, this_job
from bucketjit._processes.on_shards import (
    WITHOUT_ROWS,
    OnShards,
    no_exact_shape,
    outside_of_meshes,
)
from bucketjit._processes.recall import Arguments, Offer, Recall
from bucketjit._raised import first_line, in_one_line
from bucketjit._runtime.decisions import Because, Exact, Masked, Refused
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.fast_path.handler import Evicted
from bucketjit._signature.signer import SignedCall
from bucketjit._tracing.interface import Interface
from bucketjit.errors import (
    AgreementError,
    BucketOverflowError,
    FallbackError,
    MaskingError,
    SpecError,
)


class Meeting(NamedTuple):
    """The processes before one call.

    Attributes:
        name: The name of the function.
        job: The processes; None if this process is alone, or a function knows the bucket.
        number: The number of the call.
        seconds: How long to wait for other processes.
    """

    name: str
    job: Job | None
    number: int
    seconds: float

    def all(self, message: Any) -> list[Any]:
        """Give a message, and get those of all processes."""
        if self.job is None:
            return [message]
        try:
            texts = self.job.gather(json.dumps(message), self.seconds)
        except StoreLost as error:
            why = f"it holds the key-value store, which does not answer ({first_line(error)})"
            raise self.error({0: "is gone"}, why) from None
        late = {i: f"did not come within {self.seconds:g} s" for i, x in enumerate(texts) if not x}
        if self.job.rank in late:
            late[self.job.rank] = "came when the others had given up waiting for it"
        if late:
            why = f"it may be slower than timeout={self.seconds:g}, hang, or have left out a call"
            raise self.error(late, why)
        return [json.loads(text) for text in texts if text]

    def error(self, acts: Mapping[int, str], remedy: str) -> AgreementError:
        """The error for processes that do not agree."""
        every = "; ".join(f"process {i} {act}" for i, act in sorted(acts.items()))
        return AgreementError(
            f"{self.name}, call {self.number}: {every}. No process runs this call: {remedy}",
            self.number,
            dict(acts),
        )


class Agreement:
    """Runs the calls of one engine together with the other processes."""

    def __init__(self, chosen: Agreed, shards: OnShards | None = None) -> None:
        self._chosen = chosen
        self._shards = shards
        self._active: bool | None = True if callable(chosen.by) or shards is not None else None
        # The digest of each program, and the buckets that it was run in.
        self._programs: weakref.WeakKeyDictionary[Interface, tuple[str, set[tuple[int, ...]]]]
        self._programs = weakref.WeakKeyDictionary()
        self._recall = Recall()

    @property
    def is_active(self) -> bool:
        """Whether calls are served here: not if there is one process, and no shards."""
        if self._active is None:
            self._active = jax.process_count() > 1
        return self._active

    def serve(self, engine: Engine, arguments: Arguments) -> Any:
        """Run a call on all processes."""
        if self._shards is not None:
            with outside_of_meshes():
                return self._serve(engine, arguments)
        return self._serve(engine, arguments)

    def _serve(self, engine: Engine, arguments: Arguments) -> Any:
        alone = callable(self._chosen.by) or jax.process_count() == 1
        job = None if alone else this_job()
        number = 0 if job is None else next(job.calls)
        meeting = Meeting(engine.name, job, number, self._chosen.timeout)
        try:
            offer, is_known = self._offer(engine, arguments)
        except Exception as error:
            with contextlib.suppress(AgreementError):
                meeting.all(["", [], [], True])
                meeting.all([f"raised {in_one_line(error)}"])
            raise
        masked, is_ready = self._agreed(engine, meeting, offer)
        if masked is None:
            return engine.serve(engine.signer.sign(*arguments))
        if is_ready and is_known:
            handler = self._recall.handler(masked.key, arguments)
            if handler is not None:
                with contextlib.suppress(NotPlaced, Evicted, SignatureChanged):
                    return handler.serve(*arguments)
        entry, is_compiled = self._executable(engine, meeting, offer, masked, is_ready)
        return self._run(engine, offer, arguments, masked, entry, is_compiled)

    # --- what this process offers ---

    def _offer(self, engine: Engine, arguments: Arguments) -> tuple[Offer, bool]:
        """What this process would run, and whether that is known from an earlier call."""
        leaves, key, known = self._recall.find(engine, arguments)
        if known is None:
            offer = self._new_offer(engine, arguments)
            if key is not None and offer.error is None:
                self._recall.remember(key, offer)
            return offer, False
        if self._shards is None or known.sharded is None:
            return known._replace(signed=known.signed.with_leaves(leaves)), True
        sharded = self._shards.again(known.sharded, leaves)
        return known._replace(signed=sharded.given, sharded=sharded), True

    def _new_offer(self, engine: Engine, arguments: Arguments) -> Offer:
        shards, sharded = self._shards, None
        if shards is None:
            signed = engine.signer.sign(*arguments)
            call, own = engine.resolve(signed), signed
            if engine.config.check in (Check.EXACT, Check.EXACT_ALWAYS):
                raise SpecError(
                    "check: processes that agree on a bucket have no common exact shape to compare "
                    "with; use check='poison'"
                )
        else:
            signed = shards.sign(engine, arguments)
            sharded = shards.cut(engine, signed)
            call, own = sharded.call, sharded.signed
        if call.program is None:
            digest = digest_of_call(engine, own, call)
        else:
            if call.program not in self._programs:
                self._programs[call.program] = digest_of_call(engine, own, call), set()
            digest, _ = self._programs[call.program]
        offer = Offer(signed, call, digest, {}, None, sharded)
        try:
            return offer._replace(bucket=self._bucket(engine, own, offer))
        except (FallbackError, BucketOverflowError) as error:
            return offer._replace(error=error)

    def _bucket(self, engine: Engine, own: SignedCall, offer: Offer) -> Mapping[str, int]:
        """The bucket of a call, as if it were made on this process alone."""
        why: MaskingError
        _, sizes = own.signature.open_axes(offer.call, own.shapes)
        if self._shards is not None and 0 in sizes.values():
            raise no_exact_shape(WITHOUT_ROWS[Because.EMPTY])
        match engine.decide(own, offer.call):
            case Masked(program, bucket, None) if offer.sharded is not None:
                assert self._shards is not None
                self._shards.check(offer.sharded, program)
                return bucket
            case Masked(program, bucket, None) if not program.is_checked_after_runs:
                return bucket
            case Masked(beyond=None):
                why = MaskingError("a run decides by sizes that it computes")
            case Masked(beyond=beyond):
                remedy = "choose a larger bucket, or overflow='extend'"
                why = MaskingError(str(beyond), remedy)
            case Exact(Because.NO_OPEN_AXIS) if self._shards is None:
                return {}
            case Exact(because, why):
                why = why if self._shards is None else WITHOUT_ROWS.get(because, why)
            case Refused(error):
                raise error
        raise no_exact_shape(why)

    # --- what all processes run ---

    def _agreed(self, engine: Engine, meeting: Meeting, offer: Offer) -> tuple[Masked | None, bool]:
        """The largest bucket, None if no axis is open; and whether all have its executable."""
        program = offer.call.program
        ready: list[tuple[int, ...]] = []
        if program is not None:
            _, run = self._programs[program]
            ready = [sizes for sizes in run if (program, sizes) in engine.cache]
        failed = offer.error is not None
        every = meeting.all([offer.digest, list(offer.bucket.values()), ready, failed])
        digests, buckets, readies, errors = zip(*every, strict=True)
        if any(errors) or len(set(digests)) > 1:
            self._raise_difference(engine, meeting, offer, any(errors))
        if not offer.bucket or program is None:
            return None, True
        sizes = map(max, zip(*buckets, strict=True))
        bucket = dict(zip(offer.bucket, sizes, strict=True))
        if callable(self._chosen.by):
            bucket = _of_user(engine.name, self._chosen.by, bucket)
        if not program.fits(bucket):
            acts = dict.fromkeys(range(len(every)), f"would run at {shown(bucket)}")
            raise meeting.error(acts, "the program does not hold for these sizes")
        return Masked(program, bucket), all([*bucket.values()] in map(list, x) for x in readies)

    def _raise_difference(
        self, engine: Engine, meeting: Meeting, offer: Offer, has_failed: bool
    ) -> None:
        """Raise the error for calls that differ; the processes describe theirs to each other."""
        if meeting.job is None and offer.error is not None:
            raise offer.error
        own = offer.signed if offer.sharded is None else offer.sharded.signed
        lines = described(engine, own, offer.call)
        if offer.error is not None:
            lines[0] += f", and cannot pad it: {in_one_line(offer.error)}"
        remedy = "every process must make the same calls in the same order"
        if has_failed:
            remedy = "all of them must be able to pad it; see the error, or explain(), of that one"
        raise meeting.error(differences(meeting.all(lines)), remedy) from offer.error

    def _executable(
        self, engine: Engine, meeting: Meeting, offer: Offer, masked: Masked, is_ready: bool
    ) -> tuple[Executable, bool]:
        """The executable of a bucket, which all processes have when this returns."""
        signed, call = offer.signed, offer.call
        if offer.sharded is not None:
            largest = offer.sharded.with_program(masked.program)
            signed, call = largest.signed, largest.call
        failed: Exception | None = None
        try:
            entry, source, _ = engine.provider.get(
                masked.key,
                lambda: engine.requests.masked(signed, call, masked.bucket),
                may_stand_in=False,
            )
            self._programs[masked.program][1].add(tuple(masked.bucket.values()))
        except MaskingError as refusal:
            engine.refusals.note(masked.key, refusal)
            failed = refusal if self._shards is None else no_exact_shape(refusal)
        except Exception as error:
            failed = error
        if not is_ready and meeting.job is not None:
            whys = meeting.all("" if failed is None else in_one_line(failed))
            acts = {i: f"raised {why}" for i, why in enumerate(whys) if why}
            if acts:
                raise meeting.error(acts, "mend the error on the process that is named") from failed
        if failed is not None:
            raise failed
        return entry, source == "compile"

    def _run(
        self,
        engine: Engine,
        offer: Offer,
        arguments: Arguments,
        masked: Masked,
        entry: Executable,
        is_compiled: bool,
    ) -> Any:
        """Run a call in the agreed bucket, and remember it."""
        signed, call, out = offer.signed, offer.call, engine.config.out
        if offer.sharded is not None:
            assert self._shards is not None
            program = masked.program
            result = self._shards.run(engine, offer.sharded, program, entry, out)
            signed = offer.sharded.signed
        else:
            served = engine.served(masked.key, entry, signed, call, out)
            result = engine.run(entry, signed, call, served, out)
            if engine.config.check is Check.OFF:
                self._recall.serve_by_handler(engine, offer, arguments, served)
        if is_compiled:
            engine.recompiles.note(signed, call.sizes)
        return result


def _of_user(
    name: str, by: Callable[[dict[str, int]], Any], bucket: dict[str, int]
) -> dict[str, int]:
    """The bucket that the user's function says all processes have."""
    found = by(dict(bucket))
    good = isinstance(found, Mapping) and found.keys() == bucket.keys()
    if not good or not all(is_int_from(found[v], n) for v, n in bucket.items()):
        raise AgreementError(
            f"{name}: with_agreement(by=...) was given the bucket {shown(bucket)} and returned "
            f"{found!r}; it must return a dict of the same variables, with sizes that are at least "
            "as large"
        )
    return {v: int(found[v]) for v in bucket}
