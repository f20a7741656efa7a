"""Run Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run_python(
    *words: str,
    folder: Path = ROOT,
    paths: tuple[Path, ...] = (),
    timeout: float = 300,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words on its command line; bucketjit and the tests can be imported.

    Args:
        *words: The command line, such as ``"-c", code``.
        folder: Where it runs.
        paths: Folders to import from, beside the root of the project.
        timeout: Seconds after which it is ended, and an error raised.
        **variables: Environment variables beside those of this process.
    """
    places = [*map(str, (ROOT, *paths)), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places), **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def run_well(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A process of `run_python` that ended well."""
    done = run_python(*words, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done
