"""The command ``inspect``: tells what a file of a saved function holds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from bucketjit._artifact.archive import Archive
from bucketjit._artifact.manifest import Axes, Manifest, SavedFunction, SavedProgram
from bucketjit._cli.artifacts import add_key, opened
from bucketjit._cli.command import Command
from bucketjit._cli.tables import print_tables
from bucketjit._events import LONGEST, counted, one_line, shown
from bucketjit._inspect.tables import Table, shown_bytes

_DESCRIPTION = """\
Tell what a file of BucketedExec.save holds: the function with its arguments and results, its
buckets, constants and derivatives. Every digest in the file is checked first; a damaged file ends
the command with code 1. Nothing in the file is run, and no device is needed.
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the .bkt file")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    add_key(parser)


def _run(options: argparse.Namespace) -> None:
    told = _told(opened(options), checked=options.key_file is not None)
    if options.json:
        print(json.dumps(told, indent=1))
    else:
        print_tables(_tables(told))


def _told(archive: Archive, checked: bool) -> dict[str, Any]:
    """What a file holds, as JSON has it."""
    manifest = archive.manifest
    signature = "none"
    if archive.is_signed:
        signature = "of this key" if checked else "not checked"
    return {
        "file": str(archive.path),
        "bytes": archive.path.stat().st_size,
        "format": manifest.format,
        "versions": dict(manifest.versions),
        "calling_convention": manifest.calling_convention,
        "platforms": list(manifest.platforms),
        "signature": signature,
        "out": manifest.out,
        "strategy": manifest.strategy,
        "config": dict(manifest.config),
        "constants": {
            "count": len(manifest.constants),
            "bytes": sum(manifest.members[c.member].size for c in manifest.constants),
        },
        "derivatives": len(manifest.functions) - 1,
        "functions": [_function(manifest, function) for function in manifest.functions],
    }


def _function(manifest: Manifest, function: SavedFunction) -> dict[str, Any]:
    return {
        "name": function.name,
        "arguments": [
            {"name": leaf.path, "type": _type(leaf.dtype, leaf.axes, leaf.weak_type)}
            for leaf in function.leaves
        ],
        "statics": {**function.statics[0], **function.statics[1]},
        "donated": [_parameter(function, i) for i in function.donated],
        "results": [
            _type(out.dtype, out.axes, out.weak_type) for out in function.programs[0].outputs
        ],
        "programs": [_program(manifest, program) for program in function.programs],
    }


def _parameter(function: SavedFunction, position: int) -> str:
    return function.names[position] if position < len(function.names) else str(position)


def _type(dtype: str | None, axes: Axes, weak: bool) -> str:
    if dtype is None:
        return f"size {axes[0]}"
    return f"{dtype}[{', '.join(map(str, axes))}]{' (weak)' if weak else ''}"


def _program(manifest: Manifest, program: SavedProgram) -> dict[str, Any]:
    sizes = {name: member.size for name, member in manifest.members.items()}
    return {
        "variables": list(program.variables),
        "guards": [
            *(f"{v} >= {n}" for v, n in program.lower.items() if n > 1),
            *program.guards,
            *(f"{_shape(a)} reshapes to {_shape(b)}" for a, b in program.reshapes),
            *program.presumed,
        ],
        "computed_sizes": [
            {"size": f"{made.variable} - 1", "bound": str(made.bound[0]), "line": made.line}
            for made in program.computed
        ],
        "tabulated_sizes": None if program.table is None else len(program.table.rows),
        "traced_at": [dict(sample) for sample in program.samples],
        "why": program.why,
        "masked_equations": len(program.masked),
        "dynamic_bytes": None if program.dynamic is None else sizes[program.dynamic],
        "buckets": [
            {
                "sizes": dict(bucket.sizes),
                "bytes": sizes[bucket.module],
                "executables": len(bucket.executables),
                "executable_bytes": sum(sizes[name] for name, _ in bucket.executables.values()),
            }
            for bucket in program.buckets
        ],
    }


def _shape(axes: Axes) -> str:
    return f"[{', '.join(map(str, axes))}]"


def _tables(told: Mapping[str, Any]) -> Iterator[Table]:
    first = told["functions"][0]
    versions = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    constants = told["constants"]
    programs = [program for one in told["functions"] for program in one["programs"]]
    machine = sum(bucket["executable_bytes"] for p in programs for bucket in p["buckets"])
    dynamic = sum(p["dynamic_bytes"] or 0 for p in programs)
    static = ", ".join(f"{name}={value}" for name, value in first["statics"].items())
    facts = {
        "function": first["name"],
        "size": shown_bytes(told["bytes"]),
        "written by": versions,
        "platforms": ", ".join(told["platforms"]),
        "strategy": told["strategy"],
        "constants": f"{counted(constants['count'], 'array')}, {shown_bytes(constants['bytes'])}",
        "static arguments": static or "none",
        "donated arguments": ", ".join(first["donated"]) or "none",
        "derivatives": f"up to order {told['derivatives']}" if told["derivatives"] else "none",
        "dynamic module": shown_bytes(dynamic) if dynamic else "none",
        "executables": shown_bytes(machine) if machine else "none",
        "signature": told["signature"],
    }
    yield _table(told["file"], ("what", "value"), facts.items())
    for order, function in enumerate(told["functions"]):
        of = f" of derivative {order}" if order else ""
        arguments = [(a["name"], a["type"]) for a in function["arguments"]]
        yield _table(f"Arguments{of}", ("name", "type"), arguments)
        results = [(str(i), type) for i, type in enumerate(function["results"])]
        yield _table(f"Results{of}", ("number", "type"), results)
        for number, program in enumerate(function["programs"]):
            of_program = f" of program {number}{of}" if programs[1:] else ""
            yield _buckets(program, of_program)
            if computed := program["computed_sizes"]:
                rows = [tuple(size.values()) for size in computed]
                yield _table(f"Computed sizes{of_program}", ("size", "at most", "line"), rows)


def _buckets(program: Mapping[str, Any], of: str) -> Table:
    guards = f", for {'; '.join(program['guards'])}" if program["guards"] else ""
    if program["tabulated_sizes"] is not None:
        guards += f", with constants for {counted(program['tabulated_sizes'], 'size')}"
    rows = [
        (
            shown(bucket["sizes"]) or "one size",
            shown_bytes(bucket["bytes"]),
            shown_bytes(bucket["executable_bytes"]) if bucket["executables"] else "-",
        )
        for bucket in program["buckets"]
    ]
    columns = ("sizes", "module", "executables")
    return _table(f"Buckets{of}{guards}", columns, rows, columns[1:])


def _table(title: str, columns: Any, rows: Any, numeric: Any = ()) -> Table:
    """A table of texts of a file, which a terminal must not obey."""
    cells = [[one_line(cell, LONGEST) for cell in row] for row in rows]
    return Table(one_line(title, LONGEST), columns, cells, numeric)


COMMAND = Command(
    name="inspect",
    summary="tell what a file of a saved function holds",
    description=_DESCRIPTION,
    add_arguments=_add_arguments,
    run=_run,
)
