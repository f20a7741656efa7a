"""Run a function in several processes of one job of ``jax.distributed``, on CPU devices.

    def total(rank: int, n: int) -> float:      # at the top level of a module
        ...

    first, second = run_processes(total, 2, 5)  # first.result, first.stdout, first.code

Each process has devices of its own, and collectives between processes go through gloo. No process
outlives the call.
"""

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RESULT = "result of the process: "
_GRACE = 10.0  # seconds that the others get when one process has failed


@dataclass(frozen=True)
class Outcome:
    """What became of one process.

    Attributes:
        code: Its exit status; negative if a signal has ended it, None if time has run out.
        result: What the function returned, by way of JSON; None if it did not return.
        stdout, stderr: What it printed.
    """

    code: int | None
    result: Any
    stdout: str
    stderr: str


def run_processes(
    task: Callable[..., Any],
    count: int,
    *args: Any,
    devices: int = 1,
    timeout: float = 120,
    environment: Mapping[str, str] | None = None,
    all_succeed: bool = True,
) -> list[Outcome]:
    """Run ``task(rank, *args)`` in each of some processes.

    Args:
        task: A function at the top level of a module. What it returns is given back by way of JSON.
        count: How many processes. A single one does not initialise ``jax.distributed``.
        *args: Further arguments; by way of JSON.
        devices: How many CPU devices each process has.
        timeout: Seconds after which all processes that still run are ended.
        environment: Environment variables to add.
        all_succeed: Whether a process that fails is an error. Otherwise the caller reads `Outcome`.

    Returns:
        What became of each process, by rank.

    Raises:
        AssertionError: A process failed, or time has run out, and ``all_succeed``.
    """
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", **(environment or {})}
    variables["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    # A test module is imported under its own name, never as the script that was started.
    name = f"{task.__module__}:{task.__qualname__}"
    job = [name, json.dumps(args), str(count), str(devices), str(_free_port()), str(timeout)]
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        started = []
        for rank in range(count):
            command = [sys.executable, "-m", "tests.processes.launch", str(rank), *job]
            out, err = (
                stack.enter_context(open(Path(directory, f"{rank}.{kind}"), "w+"))
                for kind in ("out", "err")
            )
            process = subprocess.Popen(
                command, env=variables, stdout=out, stderr=err, start_new_session=True
            )
            stack.callback(_end, process)
            started.append((process, out, err))
        _wait([process for process, _, _ in started], timeout, all_succeed)
        outcomes = [_outcome(*parts) for parts in started]
    if all_succeed:
        for rank, found in enumerate(outcomes):
            assert found.code == 0, (
                f"process {rank} of {count} ended with {found.code}\n"
                f"{found.stdout[-2000:]}\n{found.stderr[-5000:]}"
            )
    return outcomes


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        port: int = listening.getsockname()[1]
        return port


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float, one_for_all: bool) -> None:
    """Wait until all have ended, time has run out, or one has failed that all others need."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if one_for_all and any(codes):
            deadline = min(deadline, time.monotonic() + _GRACE)
            one_for_all = False
        time.sleep(0.02)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _outcome(process: subprocess.Popen[bytes], out: Any, err: Any) -> Outcome:
    code = process.poll()
    texts = []
    for file in (out, err):
        file.seek(0)
        texts.append(file.read())
    results = [line for line in texts[0].splitlines() if line.startswith(_RESULT)]
    result = json.loads(results[-1].removeprefix(_RESULT)) if results else None
    return Outcome(code, result, *texts)


def _main(
    rank: str, name: str, args: str, count: str, devices: str, port: str, timeout: str
) -> None:
    """One process of the job."""
    faulthandler.dump_traceback_later(max(1.0, float(timeout) - 5), exit=True)
    import jax

    jax.config.update("jax_num_cpu_devices", int(devices))
    if int(count) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", int(count), int(rank))
    module, function = name.split(":")
    task = getattr(importlib.import_module(module), function)
    result = task(int(rank), *json.loads(args))
    print(f"\n{_RESULT}{json.dumps(result)}", flush=True)
    if int(count) > 1:
        jax.distributed.shutdown()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    _main(*sys.argv[1:])
