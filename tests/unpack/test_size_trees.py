import itertools

import pytest

from bucketjit._sizes.expressions import evaluate_text
from bucketjit._unpack.size_trees import (
    OPERATIONS,
    comparison,
    product_of,
    solutions,
    tree_of,
    value_of,
)

TEXTS = [
    "b",
    "7",
    "2*b + 1",
    "-1*b + 3*s - 2",
    "b^2 - s^3",
    "floordiv(b - 5, 3) + mod(s - 4, 3)",
    "max(b, min(s, 4)) * (b + s)",
    "floordiv(-b, 2) - mod(-s, 3)",
    "b // 2 + s % 2",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_tree_has_the_value_of_the_text(text):
    tree = tree_of(text)
    for b, s in itertools.product(range(1, 8), repeat=2):
        sizes = {"b": b, "s": s}
        assert value_of(tree, sizes) == evaluate_text(text, sizes)


@pytest.mark.parametrize("text", TEXTS)
def test_a_tree_is_numbers_names_and_operations(text):
    def check(tree):
        if isinstance(tree, dict):
            assert set(tree) == {"op", "args"} and tree["op"] in OPERATIONS
            assert len(tree["args"]) == 2
            for arg in tree["args"]:
                check(arg)
        else:
            assert tree in ("b", "s") or type(tree) is int

    check(tree_of(text))


def test_numbers_are_themselves():
    assert tree_of(12) == 12 and tree_of("12") == 12 and tree_of("n") == "n"


def test_large_powers_are_not_computed():
    assert tree_of("(((9^8)^8)^8)^8")["op"] == "pow"


def test_a_guard_has_two_trees():
    assert comparison("2*b >= s - 1") == {
        "text": "2*b >= s - 1",
        "left": {"op": "mul", "args": [2, "b"]},
        "op": ">=",
        "right": {"op": "sub", "args": ["s", 1]},
    }


def test_the_number_of_elements():
    assert value_of(product_of((2, "b", "s + 1")), {"b": 3, "s": 4}) == 30
    assert product_of(()) == 1


@pytest.mark.parametrize(
    ("axes", "variables"),
    [
        ([("b", 8), ("s",)], "bs"),
        ([(3, "2*b + 1")], "b"),
        ([("3*s - b",), ("2*b", 4)], "bs"),  # the first one needs the second
        ([("b*s",), ("s",)], "bs"),
        ([("5 - b",)], "b"),
        ([("(2*b + 1)*4 - 3",)], "b"),
    ],
)
def test_variables_are_found(axes, variables):
    """Following the rules at known sizes gives these sizes back."""
    found = solutions(axes, tuple(variables))
    assert set(found) == set(variables)
    for b, s in itertools.product(range(1, 5), repeat=2):
        sizes = {"b": b, "s": s}
        solved = {}
        for variable, rule in found.items():
            size = value_of(tree_of(axes[rule["argument"]][rule["axis"]]), sizes)
            solved[variable], rest = divmod(
                size - value_of(rule["minus"], solved), value_of(rule["divide_by"], solved)
            )
            assert rest == 0
        assert solved == {v: sizes[v] for v in variables}


@pytest.mark.parametrize("axis", ["b^2", "floordiv(b, 2)", "max(b, 3)", "b*s", "mod(b, 3)"])
def test_variables_that_no_axis_gives_are_left_out(axis):
    assert solutions([(axis,)], ("b", "s")) == {}
