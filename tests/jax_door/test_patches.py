"""What is replaced in JAX while a function is traced, and that it is put back."""

from __future__ import annotations

import re
from typing import Any

import pytest

from bucketjit._ir.jax_patches import forgetful_jax, lenient_jax, selecting_jax
from bucketjit._jax.patches.patch import Patch

PATCHES = [*lenient_jax.found(), *forgetful_jax.found(), *selecting_jax.found()]


def held(patch: Patch) -> Any:
    """What is there now; None where nothing is."""
    names = patch.owner if isinstance(patch.owner, dict) else vars(patch.owner)
    return names.get(patch.name)


def test_a_patch_replaces_something_and_says_why_and_until_when() -> None:
    for patch in PATCHES:
        # The builtin `len` is found in no module; the name of a module goes before it.
        assert callable(held(patch)) or patch.name in ("len", "operator", "core"), patch
        assert patch.why.endswith(".") and patch.delete_when, patch
        assert re.search(r", 0\.\d+", patch.since), patch


@pytest.mark.parametrize("replacing", [lenient_jax, forgetful_jax, selecting_jax])
def test_everything_is_put_back(replacing: Any) -> None:
    patches = replacing.found()
    before = [held(patch) for patch in patches]
    with replacing(), replacing():
        during = [held(patch) for patch in patches]
    assert [held(patch) for patch in patches] == before
    assert all(new is not old for new, old in zip(during, before, strict=True))
