"""The direction of imports, read off the source; and that importing the package does nothing."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import bucketjit

PACKAGE = Path(bucketjit.__file__).parent

# Downhill only: a module imports from the rows above its own. Those of one row may import each
# other where the second set of rules below does not forbid it, but not in a circle.
LAYERS: tuple[frozenset[str], ...] = tuple(
    frozenset(row.split())
    for row in (
        "_errors _version _events _safe_text _planning",
        "_jax_names",
        "_jax strategies _cache _size_params _timeline",
        "_persistence _apart",
        "_dims _axes _associative _elementwise _stats _device _padded _parallel",
        "_closures _hosts",
        "_guards _nesting _number_errors _size_numbers _groups _known _stand_ins _folding _loops",
        "_skeleton _fit",
        "_own_constants",
        "_nan_paths _constant_sides _library_folds _compared",
        "_unmerge _signs",
        "_padding",
        "_rule _results _trace _signature _patches _autodiff",
        "_paired _opaque _resign",
        "_family _independence",
        "rules _interpret",
        "_check _config _signing _executable _single_threaded _chunk_device",
        "_refusals _building _lowered_types _first_run _workers",
        "_supply _plan _route _overflow _splitting _split_plan _preloading _loading _chunked_log",
        "_orders _progress _asked_sizes _open_outs",
        "_builders _engine",
        "_derivatives _explain _warmup _manifest _view",
        "_adapting _ahead",
        "_exec",
        "_decorator metrics",
        "__init__",
        "_cli",
    )
)


def modules() -> dict[str, Path]:
    """Every module, by its dotted name inside the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts)] = path
    return found


def room(module: str) -> str:
    """``rules.scan`` and ``rules.__init__`` are in the room ``rules``."""
    return module.split(".")[0]


def imported(path: Path) -> list[tuple[str, ast.stmt]]:
    """What a module imports, at any depth: dotted names with the statements."""
    found: list[tuple[str, ast.stmt]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: a relative import"
            found += [(f"{node.module}.{alias.name}", node) for alias in node.names]
    return found


def rooms_used(path: Path) -> set[str]:
    used = set()
    for name, _ in imported(path):
        if name == "bucketjit":
            used.add("__init__")
        elif name.startswith("bucketjit."):
            used.add(name.split(".")[1])
    return used


def level(name: str) -> int:
    return next((i for i, row in enumerate(LAYERS) if name in row), len(LAYERS))


def test_every_room_has_its_place() -> None:
    known = frozenset().union(*LAYERS)
    rooms = {room(m) for m in modules()}
    # A room that comes later finds its place in the table here, and is then held to it.
    assert rooms <= known | {"__main__"}, f"no layer for {rooms - known}"


@pytest.mark.parametrize("module", modules())
def test_imports_go_downhill(module: str) -> None:
    own = room(module)
    for used in rooms_used(modules()[module]) - {own}:
        assert level(used) <= level(own), f"{module} imports {used}, which is above it"


def test_nothing_imports_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module, path in modules().items():
        graph.setdefault(room(module), set()).update(rooms_used(path) - {room(module)})

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        for used in graph.get(name, ()):
            visit(used, (*trail, name))

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("module", [m for m in modules() if room(m) == "rules"])
def test_rules_do_not_know_the_engine(module: str) -> None:
    assert not rooms_used(modules()[module]) & {"_interpret", "_exec", "_executable", "_cache"}


def test_the_engine_does_not_know_the_rules() -> None:
    """The table is an argument."""
    assert "rules" not in rooms_used(modules()["_interpret"])


def test_the_cache_knows_nothing_of_jax() -> None:
    for name, _ in imported(modules()["_cache"]):
        assert not name.startswith(("jax", "bucketjit", "numpy")), name


def test_strategies_and_planning_know_nothing_of_jax() -> None:
    allowed = {"strategies": {"strategies", "_planning", "_errors"}, "_planning": {"_planning"}}
    for module, path in modules().items():
        if room(module) in allowed:
            assert not [n for n, _ in imported(path) if n.startswith("jax")]
            assert rooms_used(path) <= allowed[room(module)]


def test_errors_import_nothing_of_the_package() -> None:
    assert rooms_used(modules()["_errors"]) == set()


@pytest.mark.parametrize("module", modules())
def test_only_one_door_to_non_public_jax(module: str) -> None:
    path = modules()[module]
    private = [
        f"{name}, line {node.lineno}"
        for name, node in imported(path)
        if name.startswith(("jax.", "jaxlib")) and ("._" in name or name.startswith("jaxlib"))
    ]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr == "_src":
            private.append(f"._src, line {node.lineno}")
    assert module == "_jax" or not private


def test_each_use_of_non_public_jax_is_explained() -> None:
    """Every function of `_jax` says why and, where it reaches behind the API, since when."""
    tree = ast.parse(modules()["_jax"].read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"_jax.{node.name} says nothing"


ALLOWED_AT_IMPORT = (
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.ClassDef,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.If,
)


@pytest.mark.parametrize("module", modules())
def test_modules_only_define(module: str) -> None:
    for node in ast.parse(modules()[module].read_text()).body:
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        assert text or isinstance(node, ALLOWED_AT_IMPORT), f"{module}, line {node.lineno}"


def test_the_package_file_only_names() -> None:
    for node in ast.parse(modules()["__init__"].read_text()).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        assert docstring or isinstance(node, ast.ImportFrom)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.asname == alias.name, f"{alias.name} as {alias.asname}"
                assert not alias.name.startswith("_") or alias.name == "__version__"


_IMPORT = """
    import sys, threading
    before = set(threading.enumerate())
    import jax
    config = {k: v for k, v in jax.config.values.items()}
    hash_before = hash(tuple(map(str, config.items())))
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda e, *_, **__: compiled.append(e))
    import bucketjit
    from jax._src import xla_bridge
    assert not xla_bridge.backends_are_initialized(), "a backend was started"
    assert compiled == [], compiled
    assert hash(tuple(map(str, jax.config.values.items()))) == hash_before, "configuration"
    assert set(threading.enumerate()) == before, "threads"
    from jax._src.export import shape_poly
    assert "__bool__" not in vars(shape_poly._DimExpr), "hooks"
    heavy = {"optax", "sklearn", "matplotlib", "rich", "hypothesis", "pytest", "scipy.optimize"}
    heavy |= {"prometheus_client"}
    assert not heavy & set(sys.modules), heavy & set(sys.modules)
    print("imported", bucketjit.__version__)
"""


def test_nothing_runs_at_import() -> None:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error::DeprecationWarning:bucketjit",
            "-c",
            textwrap.dedent(_IMPORT),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == f"imported {bucketjit.__version__}"
    assert done.stderr == ""


def test_public_names() -> None:
    expected = {
        "ArgumentError",
        "BucketJitError",
        "BucketOverflowError",
        "BucketStats",
        "BucketedExec",
        "CacheInfo",
        "Fallback",
        "FallbackError",
        "FallbackWarning",
        "MaskingError",
        "Overflow",
        "RuleContext",
        "ShapeCheckError",
        "SizeMismatchError",
        "SpecError",
        "SplitError",
        "Stats",
        "StrategyContractError",
        "StrategyError",
        "strategies",
    }
    assert expected <= {n for n in vars(bucketjit) if not n.startswith("_")}
