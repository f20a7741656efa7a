"""Claims: which of several processes, on one machine or on several, writes a file.

A claim is a small file beside the place of an executable. It is created exclusively, which is one
step on network file systems as well, so one process gets it. There are no locks. The holder writes
a new count into its claim as long as it lives. Others read it, and take a claim whose count does
not change for dead: they compare neither clocks nor process numbers, which differ by machine.

If things go wrong here, two processes do the same work. None waits without end.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import socket
import threading
import time
import uuid
import weakref
from pathlib import Path

from bucketjit._persistence.files import CLAIM, remove

BEAT = 1.0  # seconds between two counts of a holder

DEAD_AFTER = 10.0  # seconds without a new count after which the holder counts as dead

_LONGEST = 512  # bytes of a claim

_CLOSING = 5.0  # seconds to wait for a count that is being written


def claim_path(directory: Path, key: str) -> Path:
    """Where the claim on an executable is.

    Args:
        directory: The directory of its file.
        key: Its key.
    """
    return directory / f"{CLAIM}{key}"


class Claim:
    """A claim that this process holds. A thread counts until it is released.

    Args:
        path: Where it is.
        handle: The open file.
        owner: What no other claim begins with.
    """

    def __init__(self, path: Path, handle: int, owner: bytes) -> None:
        self._path = path
        self._owner = owner
        self._ended = threading.Event()
        # A claim that an interrupt loses is dead soon.
        weakref.finalize(self, self._ended.set)
        # The thread alone uses the handle, and closes it. It holds no reference to this object.
        self._thread = threading.Thread(
            target=_count, args=(handle, owner, self._ended), name="bucketjit-claim", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # no more threads: the others will take this process for dead
            os.close(handle)

    def release(self) -> None:
        """Remove the claim, unless another process has taken this one for dead."""
        self._ended.set()
        if self._thread.ident is not None:
            # A network file system keeps what is removed while it is open, under another name.
            self._thread.join(_CLOSING)
        with contextlib.suppress(OSError):
            if _contents(self._path).startswith(self._owner):
                remove(self._path)


def take(path: Path) -> Claim | None:
    """Claim a file, unless it is claimed.

    Args:
        path: Where the claim is.

    Returns:
        The claim; None if there is one already.

    Raises:
        OSError: The directory cannot be written.
    """
    owner = f"{socket.gethostname()[:128]} {os.getpid()} {uuid.uuid4().hex} ".encode()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags, 0o600)
    except FileExistsError:
        return None
    try:
        _write(handle, owner, 0)
    except BaseException:
        os.close(handle)
        remove(path)
        raise
    return Claim(path, handle, owner)


def _count(handle: int, owner: bytes, ended: threading.Event) -> None:
    """What the thread of a claim runs. It writes to the open file, whatever its name is by now."""
    count = 0
    try:
        while not ended.wait(BEAT):
            count += 1
            with contextlib.suppress(OSError):  # a full disk, or another process has removed it
                _write(handle, owner, count)
    finally:
        with contextlib.suppress(OSError):
            os.close(handle)


def _write(handle: int, owner: bytes, count: int) -> None:
    """Replace the contents of a claim; they have the same length each time."""
    os.lseek(handle, 0, os.SEEK_SET)
    os.write(handle, owner + b"%012d\n" % count)
    os.fsync(handle)  # other machines see it from now on


class State(enum.Enum):
    """What became of the claim of another process.

    Attributes:
        HELD: Its holder lives, as far as one can know.
        GONE: There is none any more.
        DEAD: Its holder has stopped counting.
    """

    HELD = enum.auto()
    GONE = enum.auto()
    DEAD = enum.auto()


class Watch:
    """The claim of another process, as this one sees it.

    Args:
        path: Where it is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = b""
        self._since = time.monotonic()

    def look(self) -> State:
        """Read the claim, and compare it with what it was."""
        try:
            contents = _contents(self._path)
        except FileNotFoundError:
            return State.GONE
        except OSError as error:
            # If it stays so, its holder is as good as dead.
            contents = type(error).__name__.encode()
        now = time.monotonic()
        owners = {_owner(contents), _owner(self._seen)} - {b""}
        if len(owners) > 1:  # another process has it by now
            return State.GONE
        if contents != self._seen:
            self._seen, self._since = contents, now
        return State.DEAD if now - self._since >= DEAD_AFTER else State.HELD

    def remove_dead(self) -> None:
        """Remove the claim of a dead holder, so that any process can claim the file.

        Of several processes that try, one moves the claim away. If that was a new one by then, it
        is put back, unless there is yet another one.

        Raises:
            OSError: The directory cannot be written.
        """
        aside = self._path.with_name(f"{CLAIM}dead-{uuid.uuid4().hex}")
        try:
            os.rename(self._path, aside)
        except FileNotFoundError:
            return
        with contextlib.suppress(OSError):
            if _contents(aside) != self._seen:
                os.link(aside, self._path)  # unlike a rename, it replaces nothing
        remove(aside)


def _owner(contents: bytes) -> bytes:
    """What a claim begins with; nothing if it is being created."""
    return contents.rpartition(b" ")[0]


def _contents(path: Path) -> bytes:
    """What is in a claim.

    Raises:
        FileNotFoundError: There is none.
        OSError: It cannot be read.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(path, flags)
        try:
            return os.read(handle, _LONGEST)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno == errno.ESTALE:  # another machine has removed it meanwhile
            raise FileNotFoundError(*error.args) from None
        raise
