"""What runs the calls of a bucketed function, where several processes or shards do so together."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from bucketjit import errors
from bucketjit._compile.executable import Executable
from bucketjit._compile.requests import Requests
from bucketjit._config import Agreed, Check, Config, is_int_from
from bucketjit._events import shown
from bucketjit._ir.dynamic_axes import STATIC
from bucketjit._ir.interface import Interface
from bucketjit._ir.program import Program
from bucketjit._jax.config import outside_of_meshes
from bucketjit._processes.build_shards import AllShards, local_shards
from bucketjit._processes.job import Meeting, meeting_of
from bucketjit._processes.on_shards import WITHOUT_ROWS, OnShards, no_exact_shape
from bucketjit._processes.split_rows import ShardedCall, sharded_call
from bucketjit._raised import in_one_line
from bucketjit._runtime.decisions import Because, Masked, Unpadded
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.engine_parts import Parts, SharedState
from bucketjit._runtime.fast_path.dispatch import Arguments
from bucketjit._tracing.call import Call
from bucketjit._tracing.parameters import PLAIN_STATICS

_MOST_INPUTS = 6  # arguments that a message shows


def described(engine: Engine, call: Call) -> list[str]:
    """A call as people write it: the function with its open arguments, each argument, a program.

    Two calls with the same lines are the same call, of whatever sizes. The values of arrays that
    the function closes over are left out: they may differ.
    """
    config, signature, program = engine.config, call.signature, call.program
    rows = zip(signature.paths, signature.types, call.tokens, call.shapes, strict=True)
    opened, lines = [], []
    for path, kind, row, shape in rows:
        sizes = [str(n) if token == STATIC else token for token, n in zip(row, shape, strict=True)]
        text = f"{kind.dtype}[{', '.join(sizes)}]"
        lines.append(f"{path}: {text}{' of a Python number' * kind.weak_type}")
        opened += [text] if any(token != STATIC for token in row) else []
    opened[_MOST_INPUTS:] = ["..."] * (len(opened) > _MOST_INPUTS)
    buckets = ", ".join(f"{v} in {_plain(repr(config.strategy_of(v)))}" for v in call.sizes)
    statics: dict[Any, Any] = {**call.statics.positional, **call.statics.keyword}
    traced = [str(call.tree)]
    if isinstance(program, Program):
        traced += [str(program.jaxpr), str(program.out_tree), *map(str, program.guards)]
    return [
        f"calls {engine.name}({', '.join(opened)})" + (f" with {buckets}" if buckets else ""),
        *lines,
        *(f"the static argument {name}: {_static(value)}" for name, value in statics.items()),
        f"a function that was traced to program {digest_of(traced)}",
    ]


def digest_of(lines: Sequence[str]) -> str:
    """A digest of texts, without addresses."""
    return hashlib.sha256(_plain(repr(lines)).encode()).hexdigest()[:16]


def differences(every: Sequence[Sequence[str]]) -> dict[int, str]:
    """What each process calls: the first line, and the first one in which they differ."""
    rows = enumerate(itertools.zip_longest(*every, fillvalue="another number of arguments"))
    line, row = next(((i, row) for i, row in rows if len(set(row)) > 1), (0, ()))
    return {i: f"{x[0]}, {row[i]}" if line else x[0] for i, x in enumerate(every)}


def _static(value: object) -> str:
    """A static argument as text; its type if its ``repr`` may differ between processes."""
    return repr(value) if type(value) in PLAIN_STATICS else type(value).__qualname__


def _plain(text: str) -> str:
    """A text without addresses, which differ between processes."""
    return re.sub(r"\b0x[0-9a-f]+\b", "0x", text)


class Offer(NamedTuple):
    """What this process would run in a call.

    Attributes:
        call: The call; on shards, that of the largest one of this process, without arrays.
        digest: Equal on processes that make the same call, of whatever sizes.
        sharded: The calls of the shards of this process; None without shards.
        bucket: The padded size of each variable; empty if no axis is open.
        error: Why it has no bucket, or None.
    """

    call: Call
    digest: str
    sharded: ShardedCall | None
    bucket: Mapping[str, int] = {}
    error: Exception | None = None


class Agreement:
    """Runs the calls of one engine together with the other processes."""

    def __init__(self, chosen: Agreed, shards: OnShards | None = None) -> None:
        self._chosen = chosen
        self._shards = shards
        self._digests: weakref.WeakKeyDictionary[Interface, str] = weakref.WeakKeyDictionary()

    @property
    def is_active(self) -> bool:
        """Whether calls are served here: not if there is one process, and no shards."""
        return callable(self._chosen.by) or self._shards is not None or jax.process_count() > 1

    def serve(self, engine: Engine, arguments: Arguments) -> Any:
        with contextlib.nullcontext() if self._shards is None else outside_of_meshes():
            meeting = meeting_of(engine.name, self._chosen.timeout, callable(self._chosen.by))
            try:
                offer = self._offer(engine, arguments)
            except Exception as error:
                with contextlib.suppress(errors.AgreementError):
                    meeting.all(["", [], [], True])
                    meeting.all([f"raised {in_one_line(error)}"])
                raise
            masked, is_ready = self._agreed(engine, meeting, offer)
            if masked is None:
                return engine.serve_resolved(offer.call)
            entry, is_compiled = self._executable(engine, meeting, offer, masked, is_ready)
            if offer.sharded is not None:
                assert self._shards is not None
                result = self._shards.run(engine, offer.sharded, entry, engine.config.out)
            else:
                served = engine.served(masked.key, entry, offer.call)
                result = engine.run(entry, offer.call, served, engine.config.out)
            if is_compiled:
                engine.recompiles.note(offer.call, entry)
            return result

    def _offer(self, engine: Engine, arguments: Arguments) -> Offer:
        sharded = None
        if self._shards is not None:
            sharded = self._shards.cut(engine, arguments)
            call = sharded.call
        else:
            call = engine.resolve(engine.signer.sign(*arguments))
            if engine.config.check in (Check.EXACT, Check.EXACT_ALWAYS):
                raise errors.SpecError(
                    "check: processes that agree on a bucket have no common exact shape to compare "
                    "with; use check='poison'"
                )
        digest = None if call.program is None else self._digests.get(call.program)
        if digest is None:
            digest = digest_of(described(engine, call))
            if call.program is not None:
                self._digests[call.program] = digest
        offer = Offer(call, digest, sharded)
        try:
            return offer._replace(bucket=self._bucket(engine, offer))
        except (errors.FallbackError, errors.BucketOverflowError) as error:
            return offer._replace(error=error)

    def _bucket(self, engine: Engine, offer: Offer) -> Mapping[str, int]:
        """The bucket of a call, as if it were made on this process alone."""
        why: errors.MaskingError
        call = offer.call
        if self._shards is not None:
            _, sizes = call.signature.open_axes(call, call.shapes)
            if 0 in sizes.values():
                raise no_exact_shape(WITHOUT_ROWS[Because.EMPTY])
        match engine.decisions.decide(call):
            case Masked(program, bucket, None) if offer.sharded is not None:
                assert self._shards is not None
                self._shards.check(offer.sharded, program)
                return bucket
            case Masked(program, bucket, None) if not program.is_checked_after_runs:
                return bucket
            case Masked(beyond=None):
                why = errors.MaskingError("a run decides by sizes that it computes")
            case Masked(beyond=beyond):
                remedy = "choose a larger bucket, or overflow='extend'"
                why = errors.MaskingError(str(beyond), remedy)
            case Unpadded(Because.NO_OPEN_AXIS) if self._shards is None:
                return {}
            case Unpadded(because, why):
                why = why if self._shards is None else WITHOUT_ROWS.get(because, why)
        raise no_exact_shape(why)

    def _agreed(self, engine: Engine, meeting: Meeting, offer: Offer) -> tuple[Masked | None, bool]:
        """The largest bucket, None if no axis is open; and whether all have its executable."""
        program = offer.call.program
        ready = [key[1] for key, _ in engine.cache.items() if key[0] is program]
        failed = offer.error is not None
        every = meeting.all([offer.digest, list(offer.bucket.values()), ready, failed])
        digests, buckets, readies, failures = zip(*every, strict=True)
        if any(failures) or len(set(digests)) > 1:  # the processes describe theirs to each other
            if meeting.job is None and offer.error is not None:
                raise offer.error
            lines = described(engine, offer.call)
            if offer.error is not None:
                lines[0] += f", and cannot pad it: {in_one_line(offer.error)}"
            remedy = "every process must make the same calls in the same order"
            if any(failures):
                remedy = "all must be able to pad it; see the error, or explain(), of that one"
            raise meeting.error(differences(meeting.all(lines)), remedy) from offer.error
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

    def _executable(
        self, engine: Engine, meeting: Meeting, offer: Offer, masked: Masked, is_ready: bool
    ) -> tuple[Executable, bool]:
        """The executable of a bucket, which all processes have when this returns."""
        failed: Exception | None = None
        try:
            make = functools.partial(engine.requests.of, offer.call, masked.bucket)
            entry, source, _ = engine.provider.get(masked.key, make, may_stand_in=False)
        except errors.MaskingError as refusal:
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


def _of_user(
    name: str, by: Callable[[dict[str, int]], Any], bucket: dict[str, int]
) -> dict[str, int]:
    """The bucket that the user's function says all processes have."""
    agreed = by(dict(bucket))
    good = isinstance(agreed, Mapping) and agreed.keys() == bucket.keys()
    if not good or not all(is_int_from(agreed[v], n) for v, n in bucket.items()):
        raise errors.AgreementError(
            f"{name}: with_agreement(by=...) was given the bucket {shown(bucket)} and returned "
            f"{agreed!r}; it must return a dict of the same variables, with sizes that are at "
            "least as large"
        )
    return {v: int(agreed[v]) for v in bucket}


def engine_of(config: Config, shared: SharedState | None) -> Engine:
    """The engine of a configuration whose calls run together."""
    agreed, sharded = config.agreed or Agreed(), config.sharded
    if sharded is None:
        engine = Engine(config, shared)
        engine.together = Agreement(agreed)
    else:
        refuse_on_shards(dataclasses.replace(config, sharded=None), "with_processes")
        requests = functools.partial(Requests, transform=AllShards(sharded))
        engine = Engine(config, shared, Parts(requests=requests))
        engine.together = Agreement(agreed, OnShards(sharded))
    return engine


def call_of_shard(engine: Engine, call: Call) -> Call:
    """The call of the largest shard of this process, for functions of one; else the call itself."""
    if engine.config.sharded is None:
        return call
    count = len(local_shards(engine.config.sharded).devices)
    with engine.lock, call.signature.restoring_axes():
        return sharded_call(engine, call, count).call


def refuse_on_shards(config: Config, what: str) -> None:
    """Refuse what has no form for a function of one shard, or for one with shardings."""
    if config.sharded is not None:
        AllShards(config.sharded).refuse(what)
    if config.shardings:
        options = " and ".join(config.shardings)
        raise errors.SpecError(f"{what} is not there with {options}; use a function without them")
