"""How a call's arguments differ from those that something was made for, in words."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit._tracing.leaf_types import LeafType, leaf_type
from bucketjit._tracing.made_for import (
    ArgumentFacts,
    LeafFacts,
    facts_made_for,
    facts_of_call,
    in_words,
    mismatches,
)
from bucketjit._tracing.resolution import open_shapes

NAMES = ("x", "y", "z")


def name(position: int) -> str:
    return NAMES[position]


def made(
    *args: Any, opened: dict[str, tuple[str, ...]] | None = None, statics: Any = None, **kwargs: Any
) -> ArgumentFacts:
    """The facts of arguments like these, with some axes open, by path."""
    leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
    types, shapes = zip(*(leaf_type(x, "") for x in leaves), strict=True) if leaves else ((), ())
    plain = facts_made_for(tree, types, shapes, name)
    tokens = [
        (opened or {}).get(x.path, ("_",) * len(x.shape)) for x in plain.leaves if x.words != "None"
    ]
    return facts_made_for(tree, types, open_shapes(tokens, shapes), name, statics or {})


def lines(facts: ArgumentFacts, *args: Any, **kwargs: Any) -> list[str]:
    return mismatches(facts, facts_of_call(args, kwargs, name))


OPEN = made(np.ones((4, 8), np.float32), opened={"x": ("b", "_")})


def test_a_call_that_fits_has_no_lines() -> None:
    for call in (np.ones((3, 8), np.float32), jnp.ones((7, 8)), np.ones((0, 8), np.float32)):
        assert lines(OPEN, call) == []


@pytest.mark.parametrize(
    "value, type_",
    [
        (np.ones((4, 8), np.float16), "float16[4, 8]"),
        (np.ones((4, 8), np.int32), "int32[4, 8]"),
        (np.ones((4, 9), np.float32), "float32[4, 9]"),
        (np.ones(8, np.float32), "float32[8]"),
        (np.ones((4, 8, 1), np.float32), "float32[4, 8, 1]"),
        (2.0, "float32[] of weak type"),
        (None, "None"),
        ("text", "str"),
        (np.array(["a"]), "ndarray of dtype('<U1')"),
        ([np.ones((4, 8), np.float32)], "a container of x[0]"),
        ({"a": 1, "b": 2, "c": 3, "d": 4}, "a container of x['a'], x['b'], x['c'] and 1 more"),
    ],
)
def test_the_line_has_the_path_and_both_types(value: Any, type_: str) -> None:
    assert lines(OPEN, value) == [f"x: compiled for float32[b, 8], called with {type_}"]


def test_weak_types_differ_both_ways() -> None:
    strong, weak = np.float32(2), 2.0
    assert lines(made(weak), strong) == [
        "x: compiled for float32[] of weak type, called with float32[]"
    ]
    assert lines(made(strong), weak) == [
        "x: compiled for float32[], called with float32[] of weak type"
    ]


def test_missing_and_extra_arguments_are_named() -> None:
    both = made(np.ones(3, np.float32), np.ones(2, np.int32))
    assert lines(both, np.ones(3, np.float32)) == ["y: compiled for int32[2], called without it"]
    assert lines(both, np.ones(3, np.float32), np.ones(2, np.int32), True) == [
        "z: compiled for no such argument, called with bool[]"
    ]
    assert lines(made(), 1) == [
        "x: compiled for no such argument, called with int32[] of weak type"
    ]


def test_keys_of_containers_are_named() -> None:
    facts = made({"w": np.ones(3, np.float32), "b": np.ones(1, np.float32)})
    assert lines(facts, {"w": np.ones(3, np.float32), "c": np.ones(1, np.float16)}) == [
        "x['b']: compiled for float32[1], called without it",
        "x['c']: compiled for no such argument, called with float16[1]",
    ]
    assert lines(facts, np.ones(3, np.float32)) == [
        "x: compiled for a container of x['b'], x['w'], called with float32[3]"
    ]


def test_none_on_either_side() -> None:
    facts = made({"w": np.ones(3, np.float32), "b": None})
    assert lines(facts, {"w": np.ones(3, np.float32), "b": None}) == []
    assert lines(facts, {"w": None, "b": np.ones(1, np.float32)}) == [
        "x['b']: compiled for None, called with float32[1]",
        "x['w']: compiled for float32[3], called with None",
    ]
    assert lines(made(None), [1]) == ["x: compiled for None, called with a container of x[0]"]


def test_by_name_in_place_of_by_position() -> None:
    x = np.ones(3, np.float32)
    assert lines(made(x), x=x) == [
        "x: compiled for one given by position, called with an argument given by name"
    ]
    assert lines(made(x=x), x) == [
        "x: compiled for an argument given by name, called with one given by position"
    ]


def test_sizes_are_ints() -> None:
    tree = jax.tree_util.tree_structure(((0,), {}))
    facts = facts_made_for(tree, [LeafType(None, True, 1)], [("n",)], name)
    assert lines(facts, 3) == lines(facts, np.int64(3)) == []
    for value, type_ in (
        (3.0, "float32[] of weak type"),
        (True, "bool[]"),
        (jnp.int32(3), "int32[]"),
    ):
        assert lines(facts, value) == [f"x: compiled for an int, the size n, called with {type_}"]
    fixed = facts_made_for(tree, [LeafType(None, True, 1)], [(5,)], name)
    assert lines(fixed, 5) == []
    assert lines(fixed, 6) == ["x: compiled for an int, the size 5, called with 6"]


def test_shardings_are_part_of_the_type() -> None:
    plain = LeafFacts("x", "float32", ("b",))
    cut = LeafFacts("x", "float32", (4,), placed="cut into (2,) parts")
    assert mismatches(ArgumentFacts((plain,), None, 1), ArgumentFacts((cut,), None, 1)) == [
        "x: compiled for float32[b], called with float32[4] cut into (2,) parts"
    ]


def test_the_verb_is_an_argument() -> None:
    call = facts_of_call((np.ones(3, np.float32), 3), {}, name)
    assert mismatches(OPEN, call, "saved for") == [
        "x: saved for float32[b, 8], called with float32[3]",
        "y: saved for no such argument, called with int32[] of weak type",
    ]
    static = made(np.ones(3, np.float32), statics={"n": 3})
    assert "part of what was saved" in mismatches(static, call, "saved for")[0]


def test_paths_need_not_differ_among_equal_trees() -> None:
    """A positional-only parameter and a keyword may have one name."""
    x = np.ones(3, np.float32)
    facts = made(x, x=np.ones(2, np.float32))
    assert lines(facts, x, x=np.ones(2, np.float32)) == []
    assert lines(facts, x, x=np.ones(4, np.float32)) == [
        "x: compiled for float32[2], called with float32[4]"
    ]


def test_a_message_shows_the_first_lines() -> None:
    facts = made([np.ones(1, np.float32)] * 20)
    message = in_words(lines(facts, [np.ones(2, np.float32)] * 20))
    assert message.startswith("x[0]: compiled for float32[1], called with float32[2]; x[1]")
    assert message.endswith("; and 12 more")
    assert in_words(["a", "b"]) == "a; b"
