"""Manifests: what was compiled, written down, and made again."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
import subprocess
import sys
import warnings
from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bucketjit import BucketedExec, Manifest
from bucketjit._persistence import environment
from bucketjit.errors import ArgumentError, SpecError
from bucketjit.types import Event, WarmupReport
from tests.comparison import assert_like_jit


def attend(params: Any, x: Any, *, key: Any, times: int) -> Any:
    noise = jax.random.normal(key, x.shape) * params["scale"]
    return (x + noise + params["shift"][0][1]) * times


def executor(**options: Any) -> BucketedExec:
    axes = {"x": "b, s, _"}
    made = BucketedExec(attend, dynamic_axes=axes, static_argnames="times", **options)
    return made.with_pow2()


def call(b: int, s: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    params = {"scale": 0.5, "shift": [(None, jnp.ones(4))]}
    x = np.ones((b, s, 4), np.float32)
    return (params, x), {"key": jax.random.key(0), "times": 3}


def test_it_comes_back_as_it_was():
    made = executor()
    for b, s in ((3, 5), (4, 7), (2, 9)):
        args, kwargs = call(b, s)
        made(*args, **kwargs)
    manifest = made.manifest()
    assert manifest.left_out == () and manifest.function == "attend"
    assert Manifest.parse(manifest.text()) == Manifest.parse(manifest.text())
    [entry] = Manifest.parse(manifest.text()).entries()
    assert [dict(s) for s in entry.sizes] == [{"b": 3, "s": 5}, {"b": 2, "s": 9}]
    params, x = entry.args
    assert (x.shape, x.dtype) == ((3, 5, 4), np.float32)
    assert params["scale"].weak_type and params["scale"].shape == ()
    assert params["shift"][0][0] is None and params["shift"][0][1].shape == (4,)
    assert entry.kwargs["times"] == 3
    assert entry.kwargs["key"].dtype == jax.random.key(0).dtype
    assert set(entry.fingerprint) == {"program", "constants"}
    told = executor().explain(*entry.args, **entry.kwargs)
    assert (told.kind, dict(told.bucket)) == ("masked", {"b": 4, "s": 8})
    warm = executor()
    warm.warmup(manifest, progress=False)
    args, kwargs = call(4, 6)
    assert warm(*args, **kwargs).shape == (4, 6, 4)
    assert warm.stats().compiles == 2 and warm.stats().misses == 2


def test_the_fingerprint_tells_whether_the_function_is_the_same(tmp_path):
    def fingerprint(constant: float) -> Any:
        made = BucketedExec(lambda x: x * constant).with_pow2().with_persistence(tmp_path)
        made(np.ones(3, np.float32))
        return made.manifest().entries()[0].fingerprint

    assert fingerprint(2.0) == fingerprint(2.0) != fingerprint(3.0)


def test_exact_shapes_are_signatures_of_their_own():
    made = BucketedExec(lambda x: x + 1)
    for n in (3, 4):
        made(np.ones((n, 2), np.float32))
    entries = made.manifest().entries()
    assert [e.args[0].shape for e in entries] == [(3, 2), (4, 2)]
    assert [e.sizes for e in entries] == [(), ()]


@pytest.mark.parametrize("strategy", [None, "pow2"])
@pytest.mark.filterwarnings("ignore::bucketjit.errors.FallbackWarning")
def test_warm_up_as_another_that_ran_exact(strategy):
    def make() -> Any:
        made = BucketedExec(lambda x, w: jnp.linalg.eigh(x @ w @ w.T @ x.T)[1])
        return made if strategy is None else made.with_pow2()

    one, other = make(), make()
    args = np.ones((5, 3), np.float32), np.ones((3, 2), np.float32)
    one(*args)
    report = other.warmup(Manifest.parse(one.manifest().text()), progress=False)
    assert (len(report.compiled), report.failed) == (1, ())
    with other.forbid_compiles():
        other(*args)


def test_sizes_that_are_arguments():
    made = BucketedExec(lambda n: jnp.ones((n, 2)).sum(), dynamic_axes=("n",)).with_pow2()
    made(5)
    [entry] = Manifest.parse(made.manifest().text()).entries()
    assert entry.args == (5,) and [dict(s) for s in entry.sizes] == [{"n": 5}]


class Scale:
    """A static argument that JSON has no word for."""


@pytest.mark.parametrize(
    ("argument", "options", "why"),
    [
        (OrderedDict(w=np.ones(2, np.float32)), {}, "args[0]: a collections.OrderedDict"),
        ({1: np.ones(2, np.float32)}, {}, "args[0]: a dict with keys other than text"),
        (Scale(), {"static_argnums": 0}, "args[0]: a static argument of type"),
    ],
)
def test_what_cannot_be_written_is_named(argument, options, why):
    def fn(p: Any, x: Any) -> Any:
        return x + (0 if isinstance(p, Scale) else jax.tree.leaves(p)[0].sum())

    made = BucketedExec(fn, **options).with_pow2()
    made(argument, np.ones(3, np.float32))
    manifest = made.manifest()
    assert manifest.signatures == ()
    [left] = manifest.left_out
    assert left.startswith(why)


def loss(weights: Any, x: Any, *, scale: float = 1.0) -> Any:
    hidden = jnp.tanh(x @ weights["in"]) @ weights["out"]
    return jnp.mean(hidden**2) * scale


def derivatives_of(fn: Any, n: int) -> list[Any]:
    """Derivatives of several orders and modes, each of which has executables of its own."""
    weights = {"in": jnp.full((4, 5), 0.1), "out": jnp.arange(5.0) / 5}
    x = jnp.asarray(np.random.default_rng(n).normal(size=(n, 4)), jnp.float32)

    def of_weights(w: Any) -> Any:
        return fn(w, x)

    return [
        jax.value_and_grad(of_weights)(weights),
        jax.jvp(of_weights, (weights,), (weights,)),
        jax.grad(lambda w: 3 * of_weights(w) + 1)(weights),
        jax.jvp(jax.grad(of_weights), (weights,), (weights,)),
        jax.grad(lambda x: fn(weights, x, scale=2.0))(x),
        of_weights(weights),
    ]


@pytest.mark.parametrize("options", [{}, {"out": "numpy"}, {"donate_argnums": 1}])
def test_derivatives_of_any_order_come_back(options):
    made, again = (
        BucketedExec(loss, dynamic_axes=(None, "n, _"), **options).with_pow2() for _ in range(2)
    )
    first = [derivatives_of(made, n) for n in (3, 7)]
    manifest = Manifest.parse(made.manifest().text())
    assert manifest.left_out == ()
    report = again.warmup(manifest, progress=False)
    assert (len(report.compiled), report.failed) == (made.cache_size(), ())
    assert report.stale == ()
    with again.forbid_compiles():
        for n, before in zip((3, 7), first, strict=True):
            found = derivatives_of(again, n)
            exact = derivatives_of(loss, n)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, exact)
            jax.tree.map(np.testing.assert_array_equal, found, before)
    assert again.stats().compiles == made.stats().compiles


def test_a_derivative_of_what_is_not_masked_here_loses_nothing_else():
    made = BucketedExec(loss, dynamic_axes=(None, "n, _")).with_pow2()
    derivatives_of(made, 3)
    here = BucketedExec(
        lambda weights, x, scale=1.0: (
            loss(weights, x, scale=scale) + x.shape[0] * float(x.shape[0])
        ),
        dynamic_axes=(None, "n, _"),
    ).with_pow2()
    report = here.warmup(made.manifest(), progress=False)
    assert report.failed == ()

    def refused(weights: Any, x: Any, scale: float = 1.0) -> Any:
        jax.debug.print("ran")
        return loss(weights, x, scale=scale)

    here = BucketedExec(refused, dynamic_axes=(None, "n, _")).with_pow2()
    report = here.warmup(made.manifest(), progress=False)
    assert len(report.compiled) == 1 and len(report.failed) == made.cache_size() - 1
    assert all("would run the function's effects" in why for _, why in report.failed)


def test_derivatives_that_are_forgotten_are_left_out():
    made = BucketedExec(lambda x: (x**2).sum()).with_pow2()
    x = np.ones(3, np.float32)
    square = jax.jvp(made, (x,), (x,))[0]
    made._derivatives.clear()
    manifest = made.manifest()
    assert len(manifest.left_out) == 1 and "not known" in manifest.left_out[0]
    report = BucketedExec(lambda x: (x**2).sum()).with_pow2().warmup(manifest, progress=False)
    assert (len(report.compiled), report.failed, square) == (1, (), 3)
    assert f"\n  not in the manifest: {manifest.left_out[0]}" in str(report)


def test_names_in_any_letters_and_long_expressions():
    def padded(x: Any, y: Any) -> Any:
        return x.sum() + y.sum()

    axes = ("größe, _", "größe*größe + größe, _")
    made = BucketedExec(padded, dynamic_axes=axes).with_pow2()
    made(np.ones((3, 2), np.float32), np.ones((12, 2), np.float32))
    [entry] = Manifest.parse(made.manifest().text()).entries()
    assert [x.shape for x in entry.args] == [(3, 2), (12, 2)]
    long = "n" * 1001
    made = BucketedExec(jnp.sum, dynamic_axes=f"{long}, _").with_pow2()
    made(np.ones((3, 2), np.float32))
    [left] = made.manifest().left_out
    assert left.endswith("is not written down") and Manifest.parse(made.manifest().text())
    for name, read in (("ℓ", "l"), ("ﬁ", "fi")):
        with pytest.raises(SpecError, match=f"Python reads '{name}' as '{read}'; write that"):
            BucketedExec(jnp.sum, dynamic_axes=f"{name}, _").with_pow2()(np.ones((3, 2)))


def test_what_is_committed_to_a_device_is_so_again():
    def scaled(weights: Any, x: Any, key: Any) -> Any:
        return (x * weights).sum(0) + jax.random.normal(key, ())

    [device] = jax.devices()[:1]
    weights = jax.device_put(np.ones(2, np.float32), device)
    key = jax.device_put(jax.random.key(0), device)
    made, again = (
        BucketedExec(scaled, dynamic_axes=(None, "n, _", None)).with_pow2() for _ in range(2)
    )
    made(weights, np.ones((3, 2), np.float32), key)
    manifest = Manifest.parse(made.manifest().text())
    again.warmup(manifest, progress=False)
    with warnings.catch_warnings(), again.forbid_compiles():
        warnings.simplefilter("error")
        again(weights, np.ones((4, 2), np.float32), key)
    assert again.stats().compiles == 1
    text = manifest.text()
    for there, why in (
        (["cpu", 77], "on the device cpu:77, which is not here"),
        (["abacus", 0], "on the device abacus:0, which is not here"),
    ):
        signatures = json.loads(text)["signatures"]
        signatures[0]["args"][0]["device"] = there
        report = again.warmup(Manifest.parse(change(text, signatures=signatures)), progress=False)
        assert [reason for _, reason in report.failed if why in reason]
    signatures[0]["args"][0]["device"] = "cpu"
    with pytest.raises(SpecError, match="a platform and a number"):
        Manifest.parse(change(text, signatures=signatures))


def run(code: str, **variables: str) -> Any:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **variables},
    )


_PLACED_OTHERWISE = """
import jax, numpy as np, warnings
from bucketjit import BucketedExec, Manifest
warnings.simplefilter("error")
def calls(executor):
    executor(np.ones(3, np.float32))
    for device, n in zip(jax.devices()[1:], (7, 12)):
        executor(jax.device_put(np.ones(n, np.float32), device))
made, again = (BucketedExec(lambda x: x * 2).with_pow2() for _ in range(2))
calls(made)
again.warmup(Manifest.parse(made.manifest().text()), progress=False)
with again.forbid_compiles():
    calls(again)
print(len(made.manifest().signatures), again.stats().compiles)
"""


def test_buckets_of_calls_that_are_placed_otherwise():
    done = run(_PLACED_OTHERWISE, XLA_FLAGS="--xla_force_host_platform_device_count=3")
    assert (done.returncode, done.stdout) == (0, "3 3\n"), done.stderr


def test_a_manifest_on_standard_output():
    done = run(
        "import numpy as np\n"
        "from bucketjit import BucketedExec\n"
        "made = BucketedExec(lambda x: x * 2).with_pow2()\n"
        "_ = made(np.ones(3))\n"
        "made.manifest().save('/dev/stdout')\n"
    )
    assert len(Manifest.parse(done.stdout).entries()) == 1, done.stderr


def test_permissions_of_a_file(tmp_path):
    made = BucketedExec(lambda x: x + 1).with_pow2()
    made(np.ones(3, np.float32))
    path = tmp_path / "manifest.json"
    before = os.umask(0o027)
    try:
        made.manifest().save(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o664)
    made.manifest().save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o664


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda warmup, path: warmup(Manifest.load(path), 3), "a manifest stands alone"),
        (lambda warmup, path: warmup(3, y=Manifest.load(path)), "a manifest stands alone"),
        (lambda warmup, path: warmup(path), r"got PosixPath .* warmup\(Manifest.load\('.*'\)\)"),
        (lambda warmup, path: warmup(str(path)), r"got str; .* warmup\(Manifest.load\('.*'\)\)"),
    ],
)
def test_what_is_given_beside_a_manifest_or_in_its_place(call, message, tmp_path):
    made = BucketedExec(lambda x: x + 1).with_pow2()
    made(np.ones(3, np.float32))
    made.manifest().save(path := tmp_path / "m.json")
    with pytest.raises((SpecError, ArgumentError), match=message):
        call(made.warmup, path)
    assert made.warmup(Manifest.load(path), progress=False).present == ({"batch": 4},)


def test_a_file_that_is_none(tmp_path):
    made = BucketedExec(lambda x: x + 1).with_pow2()
    made(np.ones(3, np.float32))
    (tmp_path / "link").symlink_to(tmp_path / "file")
    made.manifest().save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and Manifest.load(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        made.manifest().save(tmp_path / "pipe")
        assert Manifest.parse(os.read(reader, 2**16).decode()) == Manifest.load(tmp_path / "file")
    finally:
        os.close(reader)


def test_a_file(tmp_path, monkeypatch):
    made = BucketedExec(lambda x: x + 1).with_pow2()
    made(np.ones(3, np.float32))
    path = tmp_path / "manifest.json"
    made.manifest().save(path)
    made.manifest().save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]
    manifest = Manifest.load(path)
    assert manifest == Manifest.parse(made.manifest().text())
    assert manifest.changes() == []
    plain = environment._of_now
    monkeypatch.setattr(environment, "_of_now", lambda: {**plain(), "jax": "9.9"})
    assert manifest.changes() == [f"jax was {jax.__version__}, is 9.9"]
    with pytest.raises(FileNotFoundError):
        Manifest.load(tmp_path / "none")


def change(text: str, **fields: Any) -> str:
    return json.dumps({**json.loads(text), **fields})


def leaf(**changes: Any) -> list[Any]:
    array = {"dtype": "float32", "weak": False, "shape": ["n"], **changes}
    bucket = {"bucket": {"n": 4}, "sizes": {"n": 3}}
    return [
        {
            "args": [array],
            "kwargs": {},
            "variables": ["n"],
            "buckets": [bucket],
            "fingerprint": None,
            "exact": False,
            "derivative": None,
        }
    ]


def derivative(*path: Any, **changes: Any) -> list[Any]:
    [calls] = leaf()
    of = {name: calls[name] for name in ("args", "kwargs", "variables")}
    return [{**calls, "derivative": {**of, "path": path, "sizes": {"n": 3}, **changes}}]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda text: text[:-20], "not JSON"),
        (lambda text: "[]", "'format': 1"),
        (lambda text: change(text, format=2), "'format': 1"),
        (lambda text: change(text, signatures=[{}]), "not as expected"),
        (lambda text: change(text, signatures=leaf(dtype="floaty")), "not as expected"),
        (lambda text: change(text, signatures=leaf(shape=[-1])), "expected a size"),
        (lambda text: change(text, signatures=leaf(shape=[1.5])), "expected a size"),
        (lambda text: change(text, signatures=leaf(shape=["m"])), "expected an expression of n"),
        (lambda text: change(text, signatures=leaf(more=1, dtype=3)), "expected an array"),
        (
            lambda text: change(text, signatures=[{**leaf()[0], "fingerprint": "x"}]),
            "fingerprint: ",
        ),
        (lambda text: change(text, signatures=derivative(["execute"])), "how a derivative comes"),
        (lambda text: change(text, signatures=derivative(["pullback", [0]])), "how a derivative"),
        (
            lambda text: change(text, signatures=derivative(*[["with_gradient", [0]]] * 5)),
            "at most order 4",
        ),
        (lambda text: change(text, signatures=leaf(shape=[2**63])), "expected a size"),
        (lambda text: change(text, signatures=derivative(["pullback", [0], [-1]])), "a size"),
        (lambda text: change(text, signatures=derivative(sizes={})), "not as expected"),
        (lambda text: change(text, signatures=derivative(args=[7])), "expected an array"),
        (lambda text: change(text, environment=["x"]), "environment: expected texts by name"),
        (lambda text: change(text, environment={"jax": 5}), r"environment\['jax'\]: expected text"),
        (lambda text: change(text, function=7), "function: expected text, got 7"),
        (lambda text: change(text, left_out=[7]), "left_out: expected text, got 7"),
    ],
)
def test_a_text_that_is_no_manifest(make, why, tmp_path):
    made = BucketedExec(lambda x: x + 1).with_pow2()
    text = make(made.manifest().text())
    with pytest.raises(SpecError, match=why):
        Manifest.parse(text)
    (tmp_path / "file").write_text(text)
    with pytest.raises(SpecError, match="is no manifest"):
        Manifest.load(tmp_path / "file")


@pytest.mark.parametrize(
    "code",
    [
        "().__class__",
        "[x for x in (1,)]",
        "__import__('os').getcwd()",
        "__import__(n)",
        "open(n)",
        "n if n else n; n",
        "n" * 1001,
        "n**9**9**9",  # takes for ever
        "n^9^9^9",
        "n^99",
        "(((((n^9)^9)^9)^9)^9)",
        "n*" + "9" * 20,
    ],
)
def test_nothing_in_a_manifest_is_run(code):
    made = BucketedExec(lambda x: x + 1).with_pow2()
    text = change(made.manifest().text(), signatures=leaf(shape=[code]))
    with pytest.raises(SpecError, match="expected an expression of n"):
        Manifest.parse(text)


def test_sizes_may_be_powers():
    made = BucketedExec(lambda x: x + 1).with_pow2()
    text = change(made.manifest().text(), signatures=leaf(shape=["n^2 + 3*n^3"]))
    [entry] = Manifest.parse(text).entries()
    assert entry.args[0].shape == (90,)


def scaled(w: Any, x: Any) -> Any:
    if x.shape[1] == 3:
        raise ValueError("three columns\nare too many")
    return x * w


def test_a_signature_that_fails_does_not_lose_the_others():
    made = BucketedExec(lambda w, x: x * w, dynamic_axes=(None, "b, _")).with_pow2()
    for rows, columns in ((3, 3), (3, 4), (9, 3), (5, 2)):
        made(np.float32(2), np.ones((rows, columns), np.float32))
    warm = BucketedExec(scaled, dynamic_axes=(None, "b, _")).with_pow2()
    report = warm.warmup(made.manifest(), progress=False)
    assert sorted(b["b"] for b in report.compiled) == [4, 8]
    assert [(sizes["b"], why) for sizes, why in report.failed] == [
        (3, "ValueError: three columns"),
        (9, "ValueError: three columns"),
    ]
    assert warm.cache_size() == 2


def test_what_has_changed_since_is_told():
    told: list[Event] = []

    def warmed(fn: Any, manifest: Manifest) -> WarmupReport:
        warm = BucketedExec(fn, dynamic_axes="b").with_pow2().with_on_event(told.append)
        report = warm.warmup(manifest, progress=False)
        assert len(report.compiled) == 1 and not report.failed
        return report

    def scale(factor: float, power: int) -> Any:
        weights = np.full(1, factor, np.float32)

        def scale(x: Any) -> Any:
            return x**power * weights

        return scale

    made = BucketedExec(scale(2.0, 2), dynamic_axes="b").with_pow2()
    made(np.ones(3, np.float32))
    manifest = made.manifest()
    assert warmed(scale(2.0, 2), manifest).stale == () and not told_stale(told)
    assert warmed(scale(3.0, 2), manifest).stale == ("the constants it closes over changed",)
    report = warmed(scale(2.0, 3), manifest)
    assert report.stale == ("the program changed",)
    assert str(report).endswith("\n  stale: the program changed")
    elsewhere = dataclasses.replace(
        manifest, function="other", environment={**manifest.environment, "jax": "9.9"}
    )
    assert warmed(scale(2.0, 2), elsewhere).stale == (
        "it was made for other, this is scale",
        f"jax was 9.9, is {jax.__version__}",
    )
    assert told_stale(told)[-1] == f"the manifest: jax was 9.9, is {jax.__version__}"


def told_stale(told: list[Event]) -> list[str]:
    return [event.detail for event in told if event.kind == "stale"]


def test_a_text_that_is_nested_too_deeply():
    with pytest.raises(SpecError, match="nested too deeply"):
        Manifest.parse("[" * 100_000)


class Moments(NamedTuple):
    count: Any
    mean: Any


def step(state: Moments, x: Any) -> Moments:
    return Moments(state.count + x.shape[0], state.mean * 0.9 + x.mean(0) * 0.1)


def test_named_tuples_such_as_states_of_optimisers():
    optimiser = optax.adam(0.1)

    def train(params: Any, state: Any, x: Any) -> Any:
        gradient = jax.grad(lambda p: ((x @ p["w"]) ** 2).mean())(params)
        updates, state = optimiser.update(gradient, state)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.ones(3)}
    args = params, optimiser.init(params), np.ones((5, 3), np.float32)
    made = BucketedExec(train).with_pow2()
    made(*args)
    manifest = Manifest.parse(made.manifest().text())
    assert manifest.left_out == ()
    later = BucketedExec(train).with_pow2()
    assert later.warmup(manifest, progress=False).compiled == ({"batch": 8},)
    with later.forbid_compiles():
        assert_like_jit(later, train, *args)


def test_a_named_tuple_that_is_not_imported_loses_nothing_else(monkeypatch):
    made = BucketedExec(lambda x: jax.tree.leaves(x)[0] + 1, dynamic_axes="b").with_pow2()
    made(np.ones(3, np.float32))
    other = BucketedExec(step).with_pow2()
    other(Moments(np.int32(0), np.zeros(2, np.float32)), np.ones((3, 2), np.float32))
    [signature] = other.manifest().signatures
    manifest = dataclasses.replace(
        made.manifest(), signatures=(signature, *made.manifest().signatures)
    )
    monkeypatch.delitem(sys.modules, __name__)
    text = manifest.text()  # reading it is no error
    report = made.warmup(Manifest.parse(text), progress=False)
    [(sizes, why)] = report.failed
    assert sizes == {"batch": 3} and f"{__name__}.Moments with the fields count, mean" in why
    assert "import what defines it before the warm-up" in why
    assert report.present == ({"b": 4},)


def test_a_class_that_is_no_named_tuple_is_not_made():
    other = BucketedExec(step).with_pow2()
    other(Moments(np.int32(0), np.zeros(2, np.float32)), np.ones((3, 2), np.float32))
    text = other.manifest().text()
    for module, name in [("os", "system"), ("builtins", "tuple"), ("os", "stat_result")]:
        changed = re.sub(r'"[^"]*",\s*"Moments"', f'"{module}", "{name}"', text)
        assert changed != text
        [(_, why)] = other.warmup(Manifest.parse(changed), progress=False).failed
        assert f"{module}.{name} with the fields" in why
