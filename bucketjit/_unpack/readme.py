"""The README of an unpacked file: how to serve the function, told with an example of that file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from bucketjit._artifact.manifest import Axes, Manifest, SavedFunction
from bucketjit._events import LONGEST, one_line, shown
from bucketjit._unpack import prose
from bucketjit._unpack.layout import Json
from bucketjit._unpack.size_trees import Tree, value_of

_MOST_ROWS = 40  # of a table; layout.json has all

_COMPARE = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


def readme_of(layout: Json, manifest: Manifest, source: str) -> str:
    """The text."""
    function, record = layout["functions"][0], manifest.functions[0]
    name = _safe(record.name)
    parts = [
        prose.HEAD.format(name=name, source=_safe(source)),
        _files(layout),
        _signature(function, record),
        _buckets(function, record),
        prose.CALL,
        _example(layout, record),
        prose.CODE,
        prose.EXPRESSIONS,
        _running(layout),
    ]
    if any(program["size_constants"] for one in layout["functions"] for program in one["programs"]):
        parts.append(prose.SIZE_CONSTANTS)
    if any(program["computed_sizes"] for one in layout["functions"] for program in one["programs"]):
        parts.append(prose.COMPUTED_SIZES)
    if len(layout["functions"]) > 1:
        parts.append(prose.DERIVATIVES)
    return "\n".join(parts)


def _files(layout: Json) -> str:
    rows = [
        ("`layout.json`", "all of what follows, for programs"),
        ("`modules/`", "a module for each bucket: StableHLO portable artifacts (`.mlirbc`)"),
    ]
    if layout["constants"]:
        total = sum(constant["bytes"] for constant in layout["constants"])
        count = len(layout["constants"])
        what = f"{count} arrays that the function needs in every call, {total:,} bytes"
        rows.append(("`constants/`", f"{what}: raw, little endian, in C order (row-major)"))
    if any(program["size_constants"] for one in layout["functions"] for program in one["programs"]):
        rows.append(("`size_constants/`", "arrays that depend on the sizes of a call, likewise"))
    return "## What is here\n\n" + _table(("", ""), rows)


def _signature(function: Json, record: SavedFunction) -> str:
    rows = [
        (f"{i}", f"`{_safe(leaf.path)}`", _type(leaf.dtype, leaf.axes))
        for i, leaf in enumerate(record.leaves)
    ]
    outs = [
        (f"{i}", f"`{_safe(named['name'])}`", _type(out.dtype, out.axes))
        for i, (named, out) in enumerate(
            zip(function["results"], record.programs[0].outputs, strict=True)
        )
    ]
    parts = [
        "## What the function takes and returns\n",
        _table(("argument", "name", "type"), rows),
        _table(("result", "name", "type"), outs),
    ]
    names = [f"`{v}`" for v in record.programs[0].variables]
    if names:
        are = "is a size that differs" if len(names) == 1 else "are sizes that differ"
        parts.append(f"Here {_listed(names)} {are} from call to call.\n")
    fixed = {**record.statics[0], **record.statics[1]}
    if fixed:
        told = ", ".join(f"`{_safe(name)}={_safe(value)}`" for name, value in fixed.items())
        parts.append(f"The function was saved with fixed values of other arguments: {told}.\n")
    return "\n".join(parts)


def _type(dtype: str | None, axes: Axes) -> str:
    if dtype is None:
        return f"a size, `{axes[0]}`"
    if dtype.startswith("key:"):
        words = ", ".join([*map(str, axes), "words"])
        return f"`uint32[{words}]`, random keys of {_safe(dtype[4:])}"
    return f"`{_safe(dtype)}[{', '.join(map(str, axes))}]`"


def _buckets(function: Json, record: SavedFunction) -> str:
    parts = ["## The buckets\n"]
    programs = function["programs"]
    if len(programs) > 1:
        parts.append(prose.PROGRAMS)
    for number, (program, saved) in enumerate(zip(programs, record.programs, strict=True)):
        if len(programs) > 1:
            parts.append(f"Program {number}:\n")
        guards = [f"`{guard['text']}`" for guard in program["guards"]]
        if guards:
            parts.append(f"The sizes of a call must meet {_listed(guards)}.\n")
        rows = []
        for bucket in program["buckets"][:_MOST_ROWS]:
            shapes = [
                f"`{_shape(x['shape'])}`" for x in bucket["inputs"] if x["kind"] == "argument"
            ]
            file = next(iter(bucket["modules"].values()))
            rows.append((bucket["name"], ", ".join(shapes), f"`{file}`"))
        parts.append(_table(("bucket", "padded shapes of the arguments", "module"), rows))
        if (more := len(program["buckets"]) - _MOST_ROWS) > 0:
            parts.append(f"And {more} more, see `layout.json`.\n")
        if saved.variables:
            parts.append(prose.BUCKETS)
    return "\n".join(parts)


def _example(layout: Json, record: SavedFunction) -> str:
    """A call of this function in numbers; empty if no example is found."""
    found = _find_example(layout["functions"][0])
    if found is None:
        return ""
    number, bucket, sizes = found
    program, saved = layout["functions"][0]["programs"][number], record.programs[number]
    if any(made["bound"] is None for made in program["computed_sizes"]):
        return ""
    lines = ["## An example\n", "A call of this function with\n"]
    shapes: dict[int, tuple[int, ...]] = {}
    for position, (leaf, axes) in enumerate(zip(record.leaves, program["arguments"], strict=True)):
        if leaf.dtype is None:
            lines.append(f"    {_safe(leaf.path)} = {value_of(axes, sizes)}")
        else:
            shapes[position] = _at(axes, sizes)
            lines.append(f"    {_safe(leaf.path)}: {_plain(leaf.dtype)}{_shape(shapes[position])}")
    vector = [sizes[v] for v in program["variables"]]
    file = next(iter(bucket["modules"].values()))
    if sizes:
        lines.append(f"\nhas the sizes {shown(sizes)}. The bucket {bucket['name']} serves it.")
    lines.append(f"The arguments of `main` in `{file}` are then\n")
    lines += _inputs(bucket, record, shapes, vector)
    computed = program["computed_sizes"]
    for made in computed:
        sizes = {**sizes, made["variable"]: value_of(made["bound"], sizes) + 1}
    if computed:
        lines.append("\nand of its results, if the function selects all that there is,\n")
    else:
        lines.append("\nand of its results,\n")
    for i, (out, axes, kind) in enumerate(
        zip(saved.outputs, program["results"], bucket["outputs"], strict=False)
    ):
        logical = _at(axes, sizes)
        padded = tuple(kind["shape"])
        cut = f", keep [{', '.join(f'0:{n}' for n in logical)}]" if logical != padded else ""
        lines.append(f"    result {i}: {_plain(out.dtype)}{_shape(padded)}{cut}")
    lines += [
        f"    result {made['output']}: the scalar {sizes[made['variable']] - 1}"
        for made in computed
    ]
    return "\n".join(lines) + "\n"


def _inputs(
    bucket: Json, record: SavedFunction, shapes: Mapping[int, tuple[int, ...]], vector: list[int]
) -> list[str]:
    """A line for each argument of ``main``; constants in a row share one."""
    lines = []
    constants = [x["constant"] for x in bucket["inputs"] if x["kind"] == "constant"]
    if constants:
        files = [f"constants/{i}.bin" for i in constants]
        told = files if len(files) <= 4 else [*files[:2], "...", files[-1]]
        lines.append(f"    {', '.join(told)}  ({len(files)} in all)")
    for one in bucket["inputs"]:
        if one["kind"] == "sizes":
            lines.append(f"    sizes: int32[{len(vector)}] = {vector}")
        elif one["kind"] == "size_constant":
            lines.append(f"    size constant {one['size_constant']}, padded to {one['shape']}")
        elif one["kind"] == "argument":
            leaf = record.leaves[one["argument"]]
            logical, padded = shapes[one["argument"]], tuple(one["shape"])
            how = f", padded from {_shape(logical)} with zeros" if logical != padded else ""
            lines.append(f"    {_safe(leaf.path)}: {_plain(leaf.dtype)}{_shape(padded)}{how}")
    return lines


def _find_example(function: Json) -> tuple[int, Json, dict[str, int]] | None:
    """A program, a bucket, and sizes that it serves, smaller than its own where possible."""
    for number, program in enumerate(function["programs"]):
        for bucket in program["buckets"]:
            for sizes in _candidates(program, bucket):
                first = next(
                    b for b in program["buckets"] if all(b["sizes"][v] >= sizes[v] for v in sizes)
                )
                if first is bucket and _holds(program, sizes):
                    return number, bucket, sizes
    return None


def _candidates(program: Json, bucket: Json) -> Iterable[dict[str, int]]:
    table = program["size_constants"]
    if table is not None:
        names = [*table["variables"], *table["more_variables"]]
        for row in table["rows"]:
            sizes = dict(zip(names, [*row["sizes"], *row["more_sizes"]], strict=True))
            if all(sizes[v] <= bucket["sizes"][v] for v in names):
                yield {v: sizes[v] for v in program["variables"]}
        return
    for part in (3, 8, 1_000_000):
        yield {
            v: max(1, n - math.ceil(n / part)) if n > 1 else n for v, n in bucket["sizes"].items()
        }
    yield dict(bucket["sizes"])


def _holds(program: Json, sizes: Mapping[str, int]) -> bool:
    try:
        return all(
            _COMPARE[guard["op"]](value_of(guard["left"], sizes), value_of(guard["right"], sizes))
            for guard in program["guards"]
        )
    except ZeroDivisionError:
        return False


def _at(axes: Sequence[Tree], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(value_of(axis, sizes) for axis in axes)


def _running(layout: Json) -> str:
    platforms = ", ".join(layout["platforms"])
    function = layout["functions"][0]
    bucket = function["programs"][0]["buckets"][0]
    file = next(iter(bucket["modules"].values()))
    parts = [prose.RUNNING.format(platforms=platforms, file=file)]
    targets = sorted(
        {
            name
            for one in layout["functions"]
            for program in one["programs"]
            for bucket in program["buckets"]
            for names in bucket["custom_calls"].values()
            for name in names
        }
    )
    if targets:
        parts.append(prose.CALLS_OUT.format(targets=_listed([f"`{_safe(t)}`" for t in targets])))
    return "\n".join(parts)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _plain(dtype: str | None) -> str:
    return "uint32" if dtype is None or dtype.startswith("key:") else _safe(dtype)


def _safe(text: str) -> str:
    """A text of a file, for Markdown: in one line, without what would end its quotes."""
    return one_line(text, LONGEST).replace("`", "'").replace("|", "/")
