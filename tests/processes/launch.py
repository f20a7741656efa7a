"""Run a function in several processes of one job of ``jax.distributed``, on CPU devices.

    def total(rank: int, n: int) -> float:      # at the top level of a module
        ...

    first, second = run_processes(total, 2, 5)  # first.result, first.stdout, first.code

Each process has devices of its own, and collectives between processes go through gloo. No process
outlives the call.
"""

import faulthandler
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

_RESULT = "result of the process: "


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
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        port = listening.getsockname()[1]
    job = [name, json.dumps(args), str(count), str(devices), str(port), str(timeout)]

    def run(rank: int) -> Outcome:
        command = [sys.executable, "-m", "tests.processes.launch", str(rank), *job]
        try:
            done = subprocess.run(
                command, env=variables, capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired as late:
            return Outcome(None, None, str(late.stdout), str(late.stderr))
        lines = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
        result = json.loads(lines[-1].removeprefix(_RESULT)) if lines else None
        return Outcome(done.returncode, result, done.stdout, done.stderr)

    with ThreadPoolExecutor(count) as threads:
        outcomes = list(threads.map(run, range(count)))
    for rank, outcome in enumerate(outcomes if all_succeed else ()):
        assert outcome.code == 0, (
            f"process {rank} of {count} ended with {outcome.code}\n"
            f"{outcome.stdout[-2000:]}\n{outcome.stderr[-5000:]}"
        )
    return outcomes


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
