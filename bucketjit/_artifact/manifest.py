"""What a ``.bkt`` file says of itself: the records behind its ``manifest.json``.

A file holds one function, and its pullbacks if derivatives were saved. A function has one program
for each set of guards, a program one module for each bucket. A module is a serialized
``jax.export.Exported`` with the flat arguments

    constants of the program, int32 sizes, size constants, arrays at padded shapes

in this order, and the flat results of the function at padded shapes, then the number of rows of
each computed size that is returned (`SavedProgram.counts`), int32 scalars. Every name of a member,
every number and every expression of sizes is checked when a manifest is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from bucketjit._artifact.expressions import check_comparison, check_expression
from bucketjit._artifact.records import decoded_as
from bucketjit.errors import ArtifactError

FORMAT = 2
"""The version of the format that is written, and the latest that is read.

Version 2 adds sizes that the program computes. A file of version 1 has none.
"""

NAME = "manifest.json"

Axes = tuple[int | str, ...]  # sizes: numbers, or text of an expression of variables


@dataclass(frozen=True)
class Leaf:
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
    """A result.

    Attributes:
        dtype: Name of its dtype.
        axes: Its sizes.
        weak_type: JAX's weak type.
    """

    dtype: str
    axes: Axes
    weak_type: bool = False


@dataclass(frozen=True)
class Constant:
    """An array that programs close over; it is stored once for all buckets.

    Attributes:
        dtype: Name of its dtype.
        shape: Its shape.
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
        arguments: Padded shape of each array argument; sizes themselves are left out.
        results: Padded shape of each result.
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
        axes: The shape of each constant, in sizes.
        dtypes: The dtype of each constant.
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
class MaskedRow:
    """An equation that is masked, as `bucketjit.types.MaskedEquation` has it."""

    primitive: str
    sizes: tuple[str, ...]
    how: str
    fills: tuple[str, ...]
    where: str


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
        presumed: Comparisons that they meet. Of a run that returns others the results are wrong.
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
    masked: tuple[MaskedRow, ...] = ()
    dynamic: str | None = None
    computed: tuple[ComputedSize, ...] = ()
    counts: tuple[str, ...] = ()
    presumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class SavedFunction:
    """The function, or a pullback of it.

    Attributes:
        name: Its name.
        tree: The member with the trees of its arguments and results, as a module that takes and
            returns one number a leaf.
        arity: Number of positional arguments, static ones left out.
        keywords: Names of the keyword arguments.
        names: Names of the positional arguments.
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
    leaves: tuple[Leaf, ...]
    statics: tuple[Mapping[str, str], Mapping[str, str]]
    donated: tuple[int, ...]
    programs: tuple[SavedProgram, ...]


@dataclass(frozen=True)
class Member:
    """What is known of a member of the archive.

    Attributes:
        size: Its bytes, uncompressed.
        sha256: Digest of its bytes, in hexadecimal.
    """

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a file holds.

    Attributes:
        format: The version of the format.
        versions: Versions of the libraries that wrote it.
        calling_convention: The version of JAX's convention for calls of modules.
        platforms: The platforms that the modules can be compiled for.
        out: The form of results, ``jax``, ``numpy`` or ``padded``.
        strategy: The strategies that chose the buckets, in words.
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
    strategy: str
    config: Mapping[str, str]
    constants: tuple[Constant, ...]
    functions: tuple[SavedFunction, ...]
    members: Mapping[str, Member] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """The manifest as JSON. Equal manifests have equal bytes."""
        return (json.dumps(asdict(self), indent=1, sort_keys=True) + "\n").encode()


def decoded(raw: bytes) -> Manifest:
    """Read a manifest."""
    try:
        value = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{NAME}: it is not JSON ({error}); the file is damaged") from None
    version = value.get("format") if isinstance(value, dict) else None
    if type(version) is not int or not 1 <= version <= FORMAT:
        raise ArtifactError(
            f"{NAME}: format {version}, and this version of bucketjit reads formats up to "
            f"{FORMAT}; load the file with the version of bucketjit that wrote it, or a later one"
        )
    if version == 1:  # it has no sizes that the program computes
        for function in value.get("functions", ()):
            for program in function.get("programs", ()):
                program.update(computed=[], counts=[], presumed=[])
    found = decoded_as(Manifest, value, NAME)
    if found.out not in ("jax", "numpy", "padded"):
        raise _error(NAME, f"out is {found.out!r}, expected one of jax, numpy, padded")
    for function in found.functions:
        for program in function.programs:
            _check_sizes(f"{NAME}: program of {function.name}", program, function.leaves)
        names = {name for program in function.programs for name in program.variables}
        for axis in (axis for leaf in function.leaves for axis in leaf.axes):
            if isinstance(axis, str):
                check_expression(axis, names, f"{NAME}: {function.name}")
    programs = [program for function in found.functions for program in function.programs]
    if not (found.platforms and found.functions and all(f.programs for f in found.functions)):
        raise ArtifactError(f"{NAME}: it names no function, or no platform; the file is damaged")
    if not all(program.buckets for program in programs):
        raise ArtifactError(f"{NAME}: a program has no bucket; the file is damaged")
    _check_references(found)
    return found


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _error(place: str, what: str) -> ArtifactError:
    return ArtifactError(f"{place}: {what}; the file is damaged or was altered")


def _check_sizes(place: str, program: SavedProgram, leaves: tuple[Leaf, ...]) -> None:
    """Check that every expression is arithmetic on the program's variables, and that all fits."""
    names = frozenset(program.variables)
    for name in names:
        if not name.isidentifier():
            raise _error(place, f"{name!r} is no name of a dimension variable")
    if set(program.lower) - names or any(n < 0 for n in program.lower.values()):
        raise _error(place, "lower does not fit the variables")
    computed = _check_computed(place, program, names)
    shapes = [
        *program.inputs,
        *(side for pair in program.reshapes for side in pair),
        *(program.table.axes if program.table is not None else ()),
    ]
    for axis in (axis for shape in shapes for axis in shape):
        if isinstance(axis, str):
            check_expression(axis, names, place)
    for axis in (axis for out in program.outputs for axis in out.axes):
        if isinstance(axis, str):
            check_expression(axis, names | set(program.counts), place)
    for guard in program.guards:
        check_comparison(guard, names, place)
    for guard in program.presumed:
        check_comparison(guard, names | computed, place)
    if any(leaf.dtype is None and len(leaf.axes) != 1 for leaf in leaves):
        raise _error(place, "an argument that is a size has other than one size")
    arrays = sum(leaf.dtype is not None for leaf in leaves)
    if len(program.inputs) != arrays:
        raise _error(place, f"it takes {len(program.inputs)} arrays, and there are {arrays}")
    for bucket in program.buckets:
        if set(bucket.sizes) != names or any(n < 1 for n in bucket.sizes.values()):
            raise _error(place, "the sizes of a bucket do not fit the variables")
        ranks = [len(shape) for shape in bucket.arguments]
        if ranks != [len(shape) for shape in program.inputs]:
            raise _error(place, "the arguments of a bucket do not fit the inputs")
        ranks = [*(len(out.axes) for out in program.outputs), *(0 for _ in program.counts)]
        if [len(shape) for shape in bucket.results] != ranks:
            raise _error(place, "the results of a bucket do not fit the outputs")
    if (table := program.table) is not None:
        if not len(table.axes) == len(table.dtypes) == len(table.members):
            raise _error(place, "axes, dtypes and members differ in number")
        if len(table.extra) != len(table.rows):
            raise _error(place, "rows and extra differ in number")
        if any(len(extra) != len(table.unfitted) for extra in table.extra):
            raise _error(place, "extra does not fit unfitted")
        own = len(program.variables) - len(table.unfitted)
        if any(len(row) != own for row in table.rows):
            raise _error(place, "the rows of the table do not fit the variables")


def _check_computed(place: str, program: SavedProgram, names: frozenset[str]) -> set[str]:
    """Check the sizes that a program computes, and return their variables."""
    known: set[str] = set()
    for made in program.computed:
        if len(made.bound) != 1:
            raise _error(place, "the bound of a computed size is one size")
        if not made.variable.isidentifier() or made.variable in names | known:
            raise _error(place, f"{made.variable!r} is no name of a computed size")
        if isinstance(made.bound[0], str):
            check_expression(made.bound[0], names | known, place)
        known.add(made.variable)
    if set(program.counts) - known or len(set(program.counts)) < len(program.counts):
        raise _error(place, "counts does not fit computed")
    return known


def _check_references(manifest: Manifest) -> None:
    """Check that members and constants that are named exist, and that no member is unused."""
    count = len(manifest.constants)
    named = [constant.member for constant in manifest.constants]
    for function in manifest.functions:
        named.append(function.tree)
        for program in function.programs:
            if any(not 0 <= i < count for i in program.constants):
                raise ArtifactError(f"{NAME}: a program of {function.name} names no constant")
            named += [] if program.table is None else program.table.members
            named += [] if program.dynamic is None else [program.dynamic]
            for bucket in program.buckets:
                named += [bucket.module, *(member for member, _ in bucket.executables.values())]
    if missing := sorted(set(named) - set(manifest.members)):
        raise ArtifactError(f"{NAME}: {missing[0]!r} is named and is no member")
    if unused := sorted(set(manifest.members) - set(named)):
        raise ArtifactError(f"{NAME}: the member {unused[0]!r} is not named by anything")
