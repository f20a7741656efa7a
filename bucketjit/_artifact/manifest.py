"""What a ``.bkt`` file says of itself: the records behind its ``manifest.json``.

A file holds one function, and its pullbacks if derivatives were saved. A function has one program
for each set of guards, a program one module for each bucket. A module is a serialized
``jax.export.Exported`` with the flat arguments

    constants of the program, int32 sizes, size constants, arrays at padded shapes

in this order, and the flat results of the function at padded shapes, then the number of rows of
each computed size that is returned (`SavedProgram.counts`), int32 scalars. Arrays are padded with
zeros, on which a module relies. A module for several platforms takes the position of the platform
first, an int32 scalar. Every name of a member, every number and every expression of sizes is
checked when a manifest is read.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import types
import typing
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field
from typing import Any

from bucketjit._ir.expressions import FUNCTIONS, parsed
from bucketjit._ir.guards import Guard
from bucketjit._stages.explain import MaskedEquation
from bucketjit.errors import ArtifactError

FORMAT = 2  # the version that is written and read
NAME = "manifest.json"

_LARGEST = 2**63  # sizes, positions and numbers in expressions are below

Axes = tuple[int | str, ...]  # sizes: numbers, or text of an expression of variables


@dataclass(frozen=True)
class SavedLeaf:
    """An argument leaf.

    Attributes:
        path: How errors name it, such as ``params['w']``.
        dtype: Name of its dtype, ``key:threefry2x32`` for random keys; None for an int that is a
            size.
        axes: Its sizes; of a size the one size that it is.
        weak_type: JAX's weak type.
    """

    path: str
    dtype: str | None
    axes: Axes
    weak_type: bool = False


@dataclass(frozen=True)
class Output:
    """A result; see `SavedLeaf`."""

    dtype: str
    axes: Axes
    weak_type: bool = False


@dataclass(frozen=True)
class Constant:
    """An array that programs close over; it is stored once for all buckets.

    Attributes:
        dtype, shape: Name of its dtype, and its shape.
        member: The member with its bytes, in C order and little endian.
    """

    dtype: str
    shape: tuple[int, ...]
    member: str


@dataclass(frozen=True)
class Bucket:
    """A module for one bucket.

    Attributes:
        sizes: Padded size of each variable.
        module: The member with the module.
        arguments, results: Padded shape of each of them; arguments that are sizes are left out.
        executables: Members with compiled executables, by the digest of their environment; each
            with the positions of the arguments that the executable takes.
    """

    sizes: Mapping[str, int]
    module: str
    arguments: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    executables: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class SizeTable:
    """Constants that depend on the logical sizes, tabulated for all sizes of the buckets.

    Attributes:
        axes, dtypes: The shape of each constant, in sizes, and its dtype.
        unfitted: Names of the variables whose size no expression of the others gives.
        rows: The logical sizes that have a row, in the order of the program's own variables.
        extra: For each row, the sizes of ``unfitted``.
        members: For each constant, the member with its values, row after row.
    """

    axes: tuple[Axes, ...]
    dtypes: tuple[str, ...]
    unfitted: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]
    extra: tuple[tuple[int, ...], ...]
    members: tuple[str, ...]


@dataclass(frozen=True)
class ComputedSize:
    """A size that a program computes. Its variable is one more than the number of rows.

    Attributes:
        variable: The name of the variable.
        bound: The number of rows that it is chosen from, one size.
        line: The line of code that computes it.
        is_checked: Whether a call must be refused if the number of rows is not from 0 to ``bound``.
    """

    variable: str
    bound: Axes
    line: str
    is_checked: bool


@dataclass(frozen=True)
class SavedProgram:
    """A program: the modules of one set of guards.

    Attributes:
        variables: The dimension variables, in the order of the vector of sizes.
        lower: The smallest size of each variable.
        guards: Comparisons that the sizes of a call meet.
        reshapes: The two shapes of each reshape that fails at some sizes.
        inputs: Sizes of each array argument.
        outputs: The results.
        constants: Positions of its constants among those of the file.
        buckets: The modules.
        avoids_reductions: Whether XLA's library on CPU must not compute its reductions.
        table: Constants that depend on the logical sizes; None if there are none.
        samples: The sizes of the concrete traces that it was made from; empty for a symbolic trace.
        why: Why it was not traced with symbolic sizes.
        masked: The equations that are masked.
        dynamic: The member with a module of all sizes, unmasked; None if it was not saved.
        computed: The sizes that it computes, each after those that its bound names.
        counts: The variables of those that its modules return after the results.
        presumed: Comparisons that they meet. Of a run that does not, the results are wrong.
        roomy: The variables whose arrays have room for results that calls take again.
    """

    variables: tuple[str, ...]
    lower: Mapping[str, int]
    guards: tuple[str, ...]
    reshapes: tuple[tuple[Axes, Axes], ...]
    inputs: tuple[Axes, ...]
    outputs: tuple[Output, ...]
    constants: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    avoids_reductions: bool = False
    table: SizeTable | None = None
    samples: tuple[Mapping[str, int], ...] = ()
    why: str = ""
    masked: tuple[MaskedEquation, ...] = ()
    dynamic: str | None = None
    computed: tuple[ComputedSize, ...] = ()
    counts: tuple[str, ...] = ()
    presumed: tuple[str, ...] = ()
    roomy: tuple[str, ...] = ()


@dataclass(frozen=True)
class SavedFunction:
    """The function, or a pullback of it.

    Attributes:
        name: Its name.
        tree: The member with the trees of its arguments and results, as a module that takes and
            returns one number a leaf.
        arity, names: Number and names of the positional arguments, static ones left out.
        keywords: Names of the keyword arguments.
        leaves: The leaves of its arguments.
        statics: Static arguments as text: those with a position, then those given by name.
        donated: Positions of the arguments whose buffers are given away.
        programs: The programs.
    """

    name: str
    tree: str
    arity: int
    keywords: tuple[str, ...]
    names: tuple[str, ...]
    leaves: tuple[SavedLeaf, ...]
    statics: tuple[Mapping[str, str], Mapping[str, str]]
    donated: tuple[int, ...]
    programs: tuple[SavedProgram, ...]


@dataclass(frozen=True)
class Member:
    """The bytes of a member of the archive, uncompressed: their number, and their digest."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a file holds.

    Attributes:
        format: The version of the format.
        versions: Versions of the libraries that wrote it.
        calling_convention: That of JAX's convention for calls of modules.
        platforms: The platforms that the modules can be compiled for.
        out: The form of results, ``jax``, ``numpy`` or ``padded``.
        config: JAX's configuration when the function was traced.
        constants: The arrays that programs close over.
        functions: The function, its pullback, the pullback of that, and so on.
        members: The members of the archive, except the manifest and its signature.
    """

    format: int
    versions: Mapping[str, str]
    calling_convention: int
    platforms: tuple[str, ...]
    out: str
    config: Mapping[str, str]
    constants: tuple[Constant, ...]
    functions: tuple[SavedFunction, ...]
    members: Mapping[str, Member] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """The manifest as JSON. Equal manifests have equal bytes."""
        return (json.dumps(asdict(self), indent=1, sort_keys=True) + "\n").encode()


def decoded(raw: bytes) -> Manifest:
    """Read a manifest. Texts that are computed with are arithmetic; all that is named exists."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{NAME}: it is not JSON ({error}); the file is damaged") from None
    version = value.get("format") if isinstance(value, dict) else None
    if type(version) is not int or version != FORMAT:
        raise ArtifactError(
            f"{NAME}: format {version}, and this version of bucketjit reads format {FORMAT}; load "
            "the file with the version of bucketjit that wrote it"
        )
    manifest: Manifest = _decoded(Manifest, value, NAME)
    if manifest.out not in ("jax", "numpy", "padded"):
        raise _error(NAME, f"out is {manifest.out!r}, expected one of jax, numpy, padded")
    named = [constant.member for constant in manifest.constants]
    for function in manifest.functions:
        place, names = f"{NAME}: {function.name}", set[str]()
        named.append(function.tree)
        for program in function.programs:
            _check_texts(place, program)
            if not program.buckets:
                raise _error(place, "a program has no bucket")
            names.update(program.variables)
            if any(i >= len(manifest.constants) for i in program.constants):
                raise _error(place, "a program names no constant")
            named += [] if program.table is None else program.table.members
            named += [] if program.dynamic is None else [program.dynamic]
            for bucket in program.buckets:
                named += [bucket.module, *(member for member, _ in bucket.executables.values())]
        if any(leaf.dtype is None and len(leaf.axes) != 1 for leaf in function.leaves):
            raise _error(place, "an argument that is a size has other than one size")
        _check_axes(place, names, *(leaf.axes for leaf in function.leaves))
    if missing := set(named) - manifest.members.keys():
        raise _error(NAME, f"{min(missing)!r} is named and is no member")
    return manifest


def _error(place: str, what: str) -> ArtifactError:
    return ArtifactError(f"{place}: {what}; the file is damaged or was altered")


def _check_texts(place: str, program: SavedProgram) -> None:
    names = set(program.variables)
    with_computed = set(names)
    for size in program.computed:
        _check_axes(place, with_computed, size.bound)
        if size.variable in with_computed:
            raise _error(place, f"{size.variable!r} is no name of a computed size")
        with_computed.add(size.variable)
    if any(not name.isidentifier() for name in with_computed):
        raise _error(place, f"{min(with_computed)!r} is no name of a size")
    _check_axes(place, names, *program.inputs, *(side for two in program.reshapes for side in two))
    _check_axes(place, names, *(() if program.table is None else program.table.axes))
    _check_axes(place, with_computed, *(out.axes for out in program.outputs))
    for guards, allowed in ((program.guards, names), (program.presumed, with_computed)):
        for guard in (guard_of(text, place) for text in guards):
            _check_axes(place, allowed, (guard.left, guard.right))


def _check_axes(place: str, names: set[str], *shapes: Axes) -> None:
    for axis in (axis for shape in shapes for axis in shape if isinstance(axis, str)):
        _check_expression(axis, names, place)


def _decoded(kind: Any, value: Any, place: str) -> Any:
    """A value of JSON as a value of an annotated type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        if lack := hints.keys() - value.keys():
            raise _error(place, f"there is no {min(lack)!r}")
        fields = {f: _decoded(hint, value[f], f"{place}: {f}") for f, hint in hints.items()}
        return kind(**fields)  # type: ignore[operator]
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        for choice in args:
            is_plain = isinstance(choice, type) and not dataclasses.is_dataclass(choice)
            if type(value) is choice if is_plain else isinstance(value, dict):
                return _decoded(choice, value, place)
    elif origin is tuple and isinstance(value, list):
        every = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(every) == len(value):
            items = enumerate(zip(every, value, strict=True))
            return tuple(_decoded(hint, x, f"{place}[{i}]") for i, (hint, x) in items)
    elif origin is Mapping and isinstance(value, dict):
        return {name: _decoded(args[1], x, f"{place}.{name}") for name, x in value.items()}
    elif type(value) is kind and not (kind is int and not 0 <= value < _LARGEST):
        return value
    name = getattr(kind, "__name__", str(kind))
    raise _error(place, f"expected {name}, got {type(value).__name__} {str(value)[:40]!r}")


# --- expressions of sizes ---

_LONGEST = 2000  # characters of an expression
_HIGHEST = 8  # exponent
_HIGHEST_IN_ALL = 64  # exponents of powers of powers, multiplied
_COMPARISON = re.compile(r"(.+?) (>=|<=|==|!=) (.+)")
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)


def _check_expression(text: str, variables: Set[str], place: str) -> None:
    """Refuse a text that is not arithmetic on dimension variables: it becomes Python code."""
    try:
        if len(text) > _LONGEST or not text.isprintable():
            raise SyntaxError("it is too long, or has other characters than text")
        _check(parsed(text), variables)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        names = ", ".join(sorted(variables))
        raise _error(place, f"{shown!r} is no expression of the sizes {names} ({error})") from None


def guard_of(text: str, place: str = NAME) -> Guard:
    if (sides := _COMPARISON.fullmatch(text)) is None:
        raise _error(place, f"{text[:60]!r} is no comparison of sizes")
    return Guard(*sides.groups())


def _check(node: ast.expr, variables: Set[str], power_around: int = 1) -> None:
    match node:
        case ast.Constant(value=int(value)) if type(value) is int and abs(value) < _LARGEST:
            return
        case ast.Name(id=name) if name in variables:
            return
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            parts = [operand]
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))):
            if not 0 <= power <= _HIGHEST or power * power_around > _HIGHEST_IN_ALL:
                raise ValueError(f"the power {power}")
            parts, power_around = [left], max(power, 1) * power_around
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _OPERATORS):
            parts = [left, right]
        case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if (
            name in FUNCTIONS["int"] and len(parts) == 2
        ):
            pass
        case _:
            raise ValueError(f"{ast.unparse(node)} is not arithmetic")
    for part in parts:
        _check(part, variables, power_around)
