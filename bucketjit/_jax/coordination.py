"""The key-value store of ``jax.distributed``, which all processes of a job read and write.

JAX has no public door to it: ``jax.experimental.multihost_utils`` gathers arrays by a program on
all devices, which takes three times as long and waits for the devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from bucketjit._jax import names

_distributed = names.module("distributed")


class StoreLost(Exception):
    """The store does not answer: the process that holds it, process 0, is gone."""


class KeyValueStore:
    """The key-value store of the job."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: str) -> None:
        """Write a value, over another one if there is one."""
        with _answering():
            self._client.key_value_set(key, value, True)

    def publish(self, key: str, value: str) -> str:
        """Write a value, unless there is one."""
        try:
            self._client.key_value_set(key, value, False)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise StoreLost(str(error)) from error
            return self.get(key, 1.0) or value
        return value

    def get(self, key: str, seconds: float) -> str | None:
        """Read a value, and wait for it if need be."""
        try:
            value: str = self._client.blocking_key_value_get(key, max(1, int(1000 * seconds)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise StoreLost(str(error)) from error
        return value

    def under(self, prefix: str) -> dict[str, str]:
        """The values whose keys begin with a prefix, by the rest of the key."""
        with _answering():
            entries = self._client.key_value_dir_get(prefix)
        return {key.removeprefix(prefix): value for key, value in entries}

    def delete(self, key: str) -> None:
        """Delete a key; all keys that begin with it, if it ends with a slash."""
        with _answering():
            self._client.key_value_delete(key)


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise StoreLost(str(error)) from error


def client() -> Any | None:
    """JAX's client of the store (``distributed.global_state.client``); None without a job."""
    return _distributed.global_state.client
