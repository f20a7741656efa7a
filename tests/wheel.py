"""Builds the source distribution and from it the wheel, and tests the wheel as users get it.

``make test-wheel`` runs it. The wheel is installed without extras into a new environment. There it
is imported, the first Python block of README runs, and so does every command.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

# What only extras install. If one came with the wheel, nothing would be tested here.
EXTRAS = ("optax", "prometheus_client", "rich", "tqdm", "zstandard")

IMPORTED = f"""
    import importlib.util, pathlib, sys, bucketjit
    from importlib.metadata import entry_points, version
    assert version("bucketjit") == bucketjit.__version__
    assert pathlib.Path(bucketjit.__file__).is_relative_to(sys.prefix), bucketjit.__file__
    assert not [name for name in {EXTRAS!r} if importlib.util.find_spec(name)]
    assert (pathlib.Path(bucketjit.__file__).parent / "py.typed").exists()
"""

# Writes what the commands read.
USED = """
    import pathlib, numpy as np
    from bucketjit import BucketedExec, load

    def total(x):
        return (x * 2).sum(axis=1)

    executor = BucketedExec(total, dynamic_axes="n, _").with_pow2().with_persistence("files")
    for n in (5, 6, 7, 3):
        executor(np.ones((n, 2), np.float32))
    executor.warmup(np.ones((1, 2), np.float32), sizes={"n": [16]})
    print(executor.report())
    print(executor.explain(np.ones((5, 2), np.float32)))
    pathlib.Path("stats.json").write_text(executor.stats().to_json())
    pathlib.Path("lengths.txt").write_text("5\\n6\\n7\\n3\\n")
    executor.save("total.bkt", np.ones((3, 2), np.float32), sizes={"n": [4, 8]}, dynamic=True)
    assert load("total.bkt")(np.ones((3, 2), np.float32)).tolist() == [4.0] * 3
"""

# Each command with a text of its output.
COMMANDS = {
    "--version": "bucketjit ",
    "--help": "bench",
    "plan lengths.txt --k 2": "pow2 ",
    "report stats.json": "4 shapes, 3 executables: 1 compile, about ",
    "cache files": "3 executables, ",
    "cache list files": "n=8 ",
    "cache prune files --max-size 0": "removed 3 of 3 files",
    "unpack total.bkt unpacked": "wrote ",
    "bench --calls 8 --largest 8": "8 calls of ",
}


def run(*command: object, cwd: Path, wanted: str = "") -> str:
    """Run a command, show it and what it takes, and return its output."""
    began = time.monotonic()
    # Neither this repository nor the environment of make is on the path.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    words = [Path(str(command[0])).name, *map(str, command[1:])]
    shown = " ".join(" ".join(word.split()) for word in words)[:88]
    print(f"{time.monotonic() - began:6.1f} s  {shown}", flush=True)
    if done.returncode or wanted not in done.stdout:
        expected = f", and {wanted!r} in its output" if wanted else ""
        sys.exit(
            f"expected exit code 0{expected}; got {done.returncode} and\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def built(directory: Path) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it."""
    environment = directory / "builds"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "-q")
    run(*pip, "build", "twine", cwd=directory)
    dist = directory / "dist"
    run(python, "-m", "build", "--outdir", dist, ROOT, cwd=directory)
    (source,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    run(python, "-m", "twine", "check", "--strict", source, wheel, cwd=directory)
    return source, wheel


def check_contents(source: Path, wheel: Path) -> None:
    """Check that all that belongs in them is there, and nothing else."""
    with tarfile.open(source) as archive:
        there = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("CITATION.cff", "LICENSE", "Makefile", "README.md", "SECURITY.md"):
        assert name in there, f"{name} is not in {source.name}"
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    assert pages <= there, f"{sorted(pages - there)} are not in {source.name}"
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"bucketjit"}, tops


def first_block(page: Path) -> str:
    """The first Python block of a page."""
    found = re.search(r"^```python[^\n]*\n(.*?)^```", page.read_text(), re.M | re.S)
    assert found, f"{page.name} has no Python block"
    return found[1]


def check_installed(wheel: Path, directory: Path) -> None:
    """Install the wheel into a new environment, and run what must work there."""
    environment, work = directory / "bare", directory / "work"
    work.mkdir()
    venv.create(environment, with_pip=True)
    python, script = environment / "bin" / "python", environment / "bin" / "bucketjit"
    run(python, "-m", "pip", "--disable-pip-version-check", "install", "-q", wheel, cwd=work)
    for code in (IMPORTED, first_block(ROOT / "README.md"), USED):
        run(
            python,
            "-W",
            "error::DeprecationWarning:bucketjit",
            "-c",
            textwrap.dedent(code),
            cwd=work,
        )
    for words, wanted in COMMANDS.items():
        run(script, *words.split(), cwd=work, wanted=wanted)
    stats = run(python, "-m", "bucketjit", "report", "--json", "stats.json", cwd=work)
    assert json.loads(stats)["shapes"] == 4
    listed = run(script, "--help", cwd=work)
    commands = re.findall(r"^ {2,4}([a-z]+) ", listed, re.M)
    assert commands, listed
    untested = set(commands) - {words.split()[0] for words in COMMANDS}
    assert not untested, f"{sorted(untested)} are in no line of COMMANDS"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", metavar="DIR", type=Path, help="keep what was built there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bucketjit-wheel-") as name:
        directory = Path(name)
        source, wheel = built(directory)
        check_contents(source, wheel)
        check_installed(wheel, directory)
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
            for path in (source, wheel):
                shutil.copy(path, options.keep)
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, works without extras")


if __name__ == "__main__":
    main()
