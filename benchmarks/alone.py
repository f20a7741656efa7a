"""Run a function in a process of its own, with any interpreter, and get its result as JSON.

What is measured in a process of its own starts cold, has peak memory of its own, and harms
nobody if it dies: XLA ends a process that has compiled too much. Nothing but the standard
library is imported here, so that the interpreter need not be that of bucketjit.

    python -m benchmarks.alone benchmarks.growth:by_leaves '{"rounds": 3}'
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        status: ``"ok"``, ``"skipped"`` (something is not installed) or ``"failed"``.
        value: What the function returned, if ``"ok"``.
        reason: Why there is no value, in one line.
    """

    status: str
    value: Any = None
    reason: str = ""


class Skipped(Exception):
    """Raised by a function that cannot run here, with the reason."""


def run_alone(
    target: str,
    arguments: dict[str, Any],
    *,
    python: str = sys.executable,
    timeout: float = 3600,
    silent: bool = True,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Outcome:
    """Call ``target``, a ``"module:function"``, with keyword arguments, in a new process.

    Args:
        target: The function; it returns what JSON can hold.
        arguments: Its arguments, likewise.
        python: The interpreter.
        timeout: Seconds after which the process is ended.
        silent: Keep back what it prints; otherwise that goes to this process's stderr.
        variables: Environment variables beside those of this process.

    Returns:
        The outcome; a function that raises, or a process that dies, is one too.
    """
    command = [python, "-m", "benchmarks.alone", target, json.dumps(arguments)]
    places = [str(ROOT)]
    if python == sys.executable:  # another interpreter has packages of its own
        places += filter(None, [os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), **variables}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if silent else None,
            text=True,
            timeout=timeout,
        )
    except FileNotFoundError:
        return Outcome("skipped", reason=f"no interpreter {python}")
    except subprocess.TimeoutExpired:
        return Outcome("failed", reason=f"no result within {timeout:.0f} s")
    if done.returncode == 0:
        return Outcome(**json.loads(done.stdout))
    last = ((done.stderr or "").strip().splitlines() or ["no output"])[-1]
    if done.returncode < 0:
        return Outcome("failed", reason=f"{signal.Signals(-done.returncode).name}: {last}")
    return Outcome("failed", reason=f"exit status {done.returncode}: {last}")


def _call(target: str, arguments: dict[str, Any]) -> Outcome:
    module, function = target.split(":")
    try:
        return Outcome("ok", getattr(importlib.import_module(module), function)(**arguments))
    except ModuleNotFoundError as error:
        return Outcome("skipped", reason=f"{error.name} is not installed")
    except Skipped as error:
        return Outcome("skipped", reason=str(error))
    except Exception as error:
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0]
        return Outcome("failed", reason=f"{type(error).__name__}: {first}"[:160])


def main() -> None:
    """Call the function that the command line names, and print the outcome as one line."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what frameworks print, natively too, must not get into the answer
    outcome = _call(sys.argv[1], json.loads(sys.argv[2]))
    print(json.dumps(vars(outcome)), file=answer, flush=True)


if __name__ == "__main__":
    # Of the module, not of this script: functions that are called raise the module's `Skipped`.
    from benchmarks import alone

    alone.main()
