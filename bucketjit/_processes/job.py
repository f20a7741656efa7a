"""The processes that ``jax.distributed`` has connected, and how each gets a text of every other.

They meet in the key-value store of ``jax.distributed``. Process 0 collects the texts and publishes
all of them under one key:

    process 1    set 7/1 "b=8"                               get 7/all
    process 2    set 7/2 "b=16"                              get 7/all
    process 0    get 7/1, get 7/2      set 7/all ["b=4", "b=8", "b=16"]

A process that has waited long enough publishes what there is. The list that is published first is
the only one, so all processes draw the same conclusion, also where one is missing.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from bucketjit._jax.coordination import KeyValueStore, StoreLost, client
from bucketjit._raised import first_line
from bucketjit.errors import AgreementError

ROOT = "bucketjit/agreement"

_GROUP = 8  # meetings whose keys are deleted together
_SLICE = 1.0  # seconds of a wait in one piece: between two of them Python handles Ctrl-C
_LOOK_AHEAD = (0.0, 0.1, 0.2, 0.3)  # pauses between looks at the next meeting, in seconds


class Job:
    """The processes of a job, which all make the same calls; ``calls`` numbers these."""

    def __init__(self, store: KeyValueStore, rank: int, count: int) -> None:
        self.rank = rank
        self.calls = itertools.count(1)
        self._store = store
        self._count = count
        self._steps = itertools.count()
        self._is_behind = False  # whether a process was missing in the last meeting

    def gather(self, text: str, seconds: float) -> list[str | None]:
        """Give a text, and get those of all processes.

        A process that the others have given up is missing in their list. It takes part in the next
        meeting, if others are in it already, so that all are in the same one again.
        """
        while True:
            step = next(self._steps)
            texts = self._meet(step, text, seconds)
            self._is_behind = None in texts
            if texts[self.rank] is not None or not self._is_begun(step + 1):
                return texts

    def _meet(self, step: int, text: str, seconds: float) -> list[str | None]:
        path, until = _path(step), time.monotonic() + seconds
        piece = min(_SLICE, seconds / 4)
        if self.rank or self._is_behind:
            self._store.set(f"{path}/{self.rank}", text)
        wanted = [f"{path}/{i}" for i in range(1, self._count)]
        texts_by_key = {}
        for key in [f"{path}/all"] if self.rank else wanted:
            value = None
            while value is None and time.monotonic() < until:
                value = self._store.get(key, min(piece, until - time.monotonic()))
                if value is None and not self.rank:  # it is not this process that is missing
                    self._store.set(f"{path}/0", text)
            texts_by_key[key] = value
        published = texts_by_key.get(f"{path}/all")
        if published is None:
            if self.rank or None in texts_by_key.values():
                texts_by_key = {f"{path}/{i}": x for i, x in self._store.under(f"{path}/").items()}
            texts_by_key[f"{path}/{self.rank}"] = text
            every = [texts_by_key.get(f"{path}/{i}") for i in range(self._count)]
            published = self._store.publish(f"{path}/all", json.dumps(every))
        if self.rank == 0 and step % _GROUP == 1 and step > _GROUP:
            # Who gives a text to a meeting has read the list of the one before.
            self._store.delete(f"{ROOT}/{step // _GROUP - 1}/")
        return json.loads(published)

    def _is_begun(self, step: int) -> bool:
        for pause in _LOOK_AHEAD:
            time.sleep(pause)
            if self._store.under(f"{_path(step)}/"):
                return True
        return False


def _path(step: int) -> str:
    return f"{ROOT}/{step // _GROUP}/{step % _GROUP}"


@functools.lru_cache(maxsize=2)
def _job_of(store_client: Any) -> Job:
    """The job of a client of the store. Another ``jax.distributed.initialize`` makes another."""
    return Job(KeyValueStore(store_client), jax.process_index(), jax.process_count())


def this_job() -> Job:
    if (store_client := client()) is None:
        raise AgreementError(
            f"JAX has {jax.process_count()} processes, and they have no key-value store to agree "
            "by: call jax.distributed.initialize() first, or give with_agreement(by=...) a "
            "function that returns the bucket of all processes"
        )
    return _job_of(store_client)


class Meeting(NamedTuple):
    """The processes before a call; ``job`` is None if this one is alone, or knows the bucket."""

    name: str
    seconds: float
    job: Job | None = None
    number: int = 0

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
        every = "; ".join(f"process {i} {act}" for i, act in sorted(acts.items()))
        text = f"{self.name}, call {self.number}: {every}. No process runs this call: {remedy}"
        return AgreementError(text, self.number, dict(acts))


def meeting_of(name: str, seconds: float, is_known: bool) -> Meeting:
    """The meeting before a call; of this process alone, if all is known."""
    if is_known or jax.process_count() == 1:
        return Meeting(name, seconds)
    job = this_job()
    return Meeting(name, seconds, job, next(job.calls))
