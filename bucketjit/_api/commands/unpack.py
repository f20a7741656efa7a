"""The command ``unpack``: writes a saved function as plain files, for programs without Python."""

from __future__ import annotations

import argparse
from pathlib import Path

from bucketjit._api.commands.command import Command, CommandError, UsageError, add_key, opened
from bucketjit._artifact.unpack import LAYOUT, unpack
from bucketjit._events import LONGEST, counted, one_line
from bucketjit._stages.report import shown_bytes

_DESCRIPTION = """\
Write a function that BucketedExec.save has saved as plain files: a StableHLO module for each
bucket, the constants as raw bytes, and layout.json, which says how to serve calls with them. A
program in C++, Rust or Go with a PJRT plugin can do so, and so can IREE; neither Python nor JAX is
needed.

    python -m bucketjit unpack model.bkt model/
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the .bkt file")
    parser.add_argument("directory", metavar="DIR", help="the directory to write")
    parser.add_argument(
        "--platform", metavar="NAME", help="of a file for several platforms, the one to write for"
    )
    parser.add_argument(
        "--text", action="store_true", help="write the modules as MLIR text, too, to read them"
    )
    parser.add_argument("--force", action="store_true", help="write into a directory with files")
    add_key(parser)


def _run(options: argparse.Namespace) -> None:
    if not options.directory:
        raise UsageError("the directory is an empty text")
    archive = opened(options)
    directory = Path(options.directory)
    try:
        written = unpack(archive, directory, options.platform, options.text, options.force)
    except OSError as error:
        raise CommandError(f"cannot write {directory}: {error.strerror or error}") from None
    files = counted(len(written.files), "file")
    told = f"wrote {files}, {shown_bytes(written.nbytes)}, into {directory}: programs read {LAYOUT}"
    print(one_line(told, LONGEST))


COMMAND = Command(
    name="unpack",
    summary="write a saved function as plain StableHLO files",
    description=_DESCRIPTION,
    add_arguments=_add_arguments,
    run=_run,
)
