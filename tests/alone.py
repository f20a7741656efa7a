"""Run Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(
    *words: str, folder: Path = ROOT, paths: tuple[Path, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words on its command line; bucketjit and the tests can be imported.

    Args:
        *words: The command line, such as ``"-c", code``.
        folder: Where it runs.
        paths: Folders to import from, beside the root of the project.
        **variables: Environment variables beside those of this process.
    """
    places = [*map(str, (ROOT, *paths)), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places), **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
