"""The command ``unpack``: writes a saved function as plain files, for programs without Python."""

from __future__ import annotations

import argparse
from pathlib import Path

from bucketjit._api.commands.command import Command, argument, named, opened
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
_ARGUMENTS = (
    argument("file", metavar="FILE", type=named, help="the .bkt file"),
    argument("directory", metavar="DIR", type=named, help="the directory to write"),
    argument("--platform", metavar="NAME", help="the one of several platforms to write for"),
    argument("--text", action="store_true", help="write the modules as MLIR text, too"),
    argument("--force", action="store_true", help="write into a directory with files"),
    argument("--key-file", metavar="KEY", help="a file with the key that FILE was signed with"),
)


def _run(options: argparse.Namespace) -> None:
    archive, directory = opened(options.file, options.key_file), Path(options.directory)
    written = unpack(archive, directory, options.platform, options.text, options.force)
    files = counted(len(written.files), "file")
    told = f"wrote {files}, {shown_bytes(written.nbytes)}, into {directory}: programs read {LAYOUT}"
    print(one_line(told, LONGEST))


COMMAND = Command(
    "unpack", "write a saved function as plain StableHLO files", _DESCRIPTION, _ARGUMENTS, _run
)
