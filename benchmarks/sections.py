"""Sections of the page: what is run, what is kept of it, and the tables made of that."""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bucketjit
from benchmarks.alone import ROOT, run_alone

RESULTS = ROOT / "benchmarks" / "results"
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"

Row = dict[str, Any]


class NotHere(RuntimeError):
    """Raised for a section that cannot be run here, with the reason."""


@dataclass(frozen=True)
class Options:
    """How a section is run.

    Attributes:
        quick: In seconds, to see that it works; the numbers are worth little.
        calls: How many calls, for the sections that say so; None for their own number.
        peers_python: The interpreter that has the peers.
    """

    quick: bool = False
    calls: int | None = None
    peers_python: str = str(PEERS_PYTHON)


@dataclass(frozen=True)
class Column:
    """A column of a table: which value of a row, under which heading, written how."""

    key: str
    heading: str
    format: str = ""

    def cell(self, row: Row) -> str:
        """The text of a cell; empty where the row has no such value."""
        value = row.get(self.key)
        return "" if value is None else format(value, self.format)


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        name: Its name on the command line and of its file.
        title: Its heading.
        text: What is measured, and what the columns mean.
        columns: Columns of its table.
        target: ``"module:function"``: takes `Options`, returns the rows.
        group: Key of the rows by which they are split into tables; None for one table.
        command: What runs it, if not ``python -m benchmarks.table``.
    """

    name: str
    title: str
    text: str
    columns: Sequence[Column]
    target: str
    group: str | None = None
    command: str | None = None

    def run(self, options: Options) -> list[Row]:
        """The rows, measured in a process of its own.

        Raises:
            NotHere: It cannot be run here, with the reason.
            RuntimeError: The section failed, with the reason.
        """
        arguments = {"target": self.target, "options": asdict(options)}
        target = "benchmarks.sections:measure"
        outcome = run_alone(target, arguments, timeout=24 * 3600, silent=False)
        if outcome.status == "skipped":
            raise NotHere(f"{self.name} skipped: {outcome.reason}")
        if outcome.status != "ok":
            raise RuntimeError(f"{self.name} {outcome.status}: {outcome.reason}")
        return outcome.value

    def tables(self, rows: list[Row]) -> str:
        """The rows as Markdown."""
        if self.group is None:
            return table(self.columns, rows)
        parts = []
        for group in dict.fromkeys(row[self.group] for row in rows):
            members = [row for row in rows if row[self.group] == group]
            parts.append(f"{group}:\n\n{table(self.columns, members)}")
        return "\n".join(parts)


def measure(target: str, options: dict[str, Any]) -> list[Row]:
    """The rows of a section, measured in this process."""
    module, function = target.split(":")
    return getattr(importlib.import_module(module), function)(Options(**options))


def table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """A Markdown table, aligned for readers of the source too; columns without values left out."""
    columns = [c for c in columns if any(c.cell(row) for row in rows)]
    lines = [[c.heading for c in columns], *([c.cell(row) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    lines.insert(1, ["-" * width for width in widths])
    return "".join(
        "| " + " | ".join(map(str.ljust, line, widths)).rstrip() + " |\n" for line in lines
    )


def add_ratios(rows: list[Row], to: str) -> None:
    """Set each contender's ratio of total times to one of them, where both have a time."""
    times = {row["contender"]: row["total_s"] for row in rows if "total_s" in row}
    for row in rows:
        if "total_s" in row and to in times:
            row["ratio"] = row["total_s"] / times[to]


# --- what is kept of a run --------------------------------------------------------------------


def command(section: Section, options: Options) -> str:
    """What runs this section again."""
    if section.command is not None:
        return section.command
    calls = "" if options.calls is None else f" --calls {options.calls}"
    return f"python -m benchmarks.table {section.name}{calls}"


def environment() -> dict[str, str]:
    """Versions and machine."""
    return {
        "python": platform.python_version(),
        "bucketjit": f"{bucketjit.__version__}{_commit()}",
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
        "machine": f"{_cpu()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB, "
        f"{platform.system()} {platform.machine()}",
    }


def _commit() -> str:
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return f" ({done.stdout.strip()})" if done.returncode == 0 else ""


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown CPU"


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def save(
    section: Section,
    rows: list[Row],
    options: Options,
    folder: Path = RESULTS,
    device: str | None = None,
) -> None:
    """Keep a run, in place of the one before.

    Args:
        section: What was run.
        rows: What it measured.
        options: How it was run.
        folder: Where it is kept.
        device: The accelerator, if it ran on one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = {
        "when": datetime.date.today().isoformat(),
        "command": command(section, options),
        "environment": environment() | ({} if device is None else {"device": device}),
        "rows": rows,
    }
    (folder / f"{section.name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def load(section: Section, folder: Path = RESULTS) -> Mapping[str, Any] | None:
    """The run that was kept, if any."""
    path = folder / f"{section.name}.json"
    return json.loads(path.read_text()) if path.exists() else None


# --- the command lines ------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser, sections: Sequence[Section]) -> None:
    """The options that all scripts share."""
    names = ", ".join(section.name for section in sections)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {names}; all of them")
    parser.add_argument("--quick", action="store_true", help="seconds each, to see that they work")
    parser.add_argument(
        "--calls", type=int, help="calls of the stream, or warm calls of growth-calls"
    )
    parser.add_argument(
        "--peers-python",
        default=str(PEERS_PYTHON),
        metavar="PATH",
        help="the interpreter that has the peers (default: %(default)s)",
    )


def options_of(arguments: argparse.Namespace) -> Options:
    """The options of a command line."""
    return Options(arguments.quick, arguments.calls, arguments.peers_python)


def select(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, sections: Sequence[Section]
) -> list[Section]:
    """The sections that a command line names, or all of them."""
    names = [section.name for section in sections]
    if unknown := sorted(set(arguments.sections) - set(names)):
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(names)}")
    return [s for s in sections if not arguments.sections or s.name in arguments.sections]


def print_sections(sections: Sequence[Section], doc: str | None) -> None:
    """The command line of a script: run its sections and print them, keeping nothing."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, sections)
    arguments = parser.parse_args()
    for section in select(parser, arguments, sections):
        print(f"## {section.title}\n\n{section.tables(section.run(options_of(arguments)))}")
