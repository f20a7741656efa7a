"""What is replaced in JAX while a function is traced, and that it is put back."""

import functools
import re
from typing import Any

import pytest

from bucketjit._ir.associative_scan import associative_scan_of
from bucketjit._ir.jax_patches import forgetful_jax, lenient_jax, selecting_jax
from bucketjit._jax.patches.operations import associative_scans
from bucketjit._jax.patches.patch import Patch
from bucketjit._tracing.shards import uneven_shards

REPLACING = [lenient_jax, forgetful_jax, selecting_jax, uneven_shards]


def held(patch: Patch) -> Any:
    """What is there now; None where nothing is."""
    names = patch.owner if isinstance(patch.owner, dict) else vars(patch.owner)
    return names.get(patch.name)


@pytest.mark.parametrize("patch", [patch for r in REPLACING for patch in r.patches])
def test_a_patch_replaces_something_and_says_why_and_until_when(patch: Patch) -> None:
    # The builtin `len` is found in no module; the name of a module goes before it.
    assert callable(held(patch)) or patch.name in ("len", "operator", "core")
    function: Any = patch.around
    while isinstance(function, functools.partial):
        function = function.args[0] if callable(function.args[0]) else function.func
    if function is associative_scan_of:
        function = associative_scans
    assert re.search(r"Since\s(.|\n)*\b0\.\d(.|\n)*\bUntil", function.__doc__), function.__doc__


@pytest.mark.parametrize("replacing", REPLACING)
def test_everything_is_put_back(replacing: Any) -> None:
    before = [held(patch) for patch in replacing.patches]
    with replacing(), replacing():
        during = [held(patch) for patch in replacing.patches]
    assert [held(patch) for patch in replacing.patches] == before
    assert all(new is not old for new, old in zip(during, before, strict=True))


def test_both_patches_of_a_name_are_in_place() -> None:
    """One wraps the other, and the first that goes leaves JAX's own function."""
    shared = {(id(p.owner), p.name) for p in lenient_jax.patches} & {
        (id(p.owner), p.name) for p in selecting_jax.patches
    }
    (_, name) = min(shared, key=str)
    (patch,) = [p for p in lenient_jax.patches if p.name == name]
    before = held(patch)
    with lenient_jax():
        one = held(patch)
        with selecting_jax():
            assert held(patch).__wrapped__ is one
        assert held(patch) is one
    assert held(patch) is before
