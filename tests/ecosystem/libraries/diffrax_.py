"""Diffrax, Lineax and Optimistix: differential equations, linear solves, fits and roots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ecosystem.model import Model, floats, sorted_floats, uniform

diffrax = pytest.importorskip("diffrax", reason="diffrax is not installed")
eqx = pytest.importorskip("equinox", reason="equinox is not installed")
lx = pytest.importorskip("lineax", reason="lineax is not installed")
optx = pytest.importorskip("optimistix", reason="optimistix is not installed")


def rate(t, y, w):
    return jnp.tanh(y @ w)


W = jnp.asarray(np.random.default_rng(0).standard_normal((3, 3)), jnp.float32)


def adaptive():
    """Every row its own adaptive solve, to one end time."""

    def solve(w, y0):
        def one(y):
            return diffrax.diffeqsolve(
                diffrax.ODETerm(rate),
                diffrax.Tsit5(),
                0.0,
                1.0,
                0.1,
                y,
                w,
                stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-4),
                max_steps=64,
            ).ys[-1]

        return jax.vmap(one)(y0)

    return solve, W


def neural_ode():
    """The gradient through a solve of fixed steps, observed at open times."""

    def loss(w, ts, y0, target):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(rate),
            diffrax.Heun(),
            0.0,
            1.0,
            0.125,
            y0,
            w,
            saveat=diffrax.SaveAt(ts=ts),
            max_steps=16,
        )
        return jnp.mean((solution.ys - target) ** 2)

    return jax.value_and_grad(loss), W


def whole_batch():
    """A batch as one system: its step size depends on all rows."""

    def solve(w, y0):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(rate),
            diffrax.Dopri5(),
            0.0,
            1.0,
            None,
            y0,
            w,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-4),
            max_steps=64,
        )
        return solution.ys[-1], solution.stats["num_steps"]

    return solve, W


def controlled():
    """A neural CDE: the path is interpolated between open times."""

    def solve(w, ts, xs):
        control = diffrax.LinearInterpolation(ts, xs)
        return diffrax.diffeqsolve(
            diffrax.ControlTerm(lambda t, y, args: jnp.tanh(args * y[:, None]), control),
            diffrax.Euler(),
            0.0,
            1.0,
            0.125,
            jnp.ones(3),
            w,
            max_steps=16,
        ).ys

    return solve, W


def least_squares():
    def solve(a, y):
        return lx.linear_solve(lx.MatrixLinearOperator(a), y, lx.QR()).value

    return (solve,)


def definite():
    def solve(x, y):
        a = x @ x.T + 3.0 * jnp.eye(x.shape[0])
        operator = lx.MatrixLinearOperator(a, lx.positive_semidefinite_tag)
        return lx.linear_solve(operator, y, lx.Cholesky()).value

    return (solve,)


def iterative():
    def solve(x, y):
        operator = lx.FunctionLinearOperator(
            lambda v: 3.0 * v + x @ (x.T @ v),
            jax.eval_shape(lambda: y),
            lx.positive_semidefinite_tag,
        )
        return lx.linear_solve(operator, y, lx.CG(1e-6, 1e-6)).value

    return (solve,)


def jacobian():
    """Its structure is found by a cache that is keyed by shapes."""

    def solve(x, y):
        operator = lx.JacobianLinearOperator(
            lambda v, _: 3.0 * v + x @ (x.T @ v), y, tags=lx.positive_semidefinite_tag
        )
        return lx.linear_solve(operator, y, lx.CG(1e-6, 1e-6)).value

    return (solve,)


def fit():
    def solve(t, y):
        def residuals(p, _):
            return p[0] * jnp.exp(-p[1] * t) - y

        solver = optx.LevenbergMarquardt(1e-5, 1e-5)
        start = jnp.array([1.0, 0.5])
        return optx.least_squares(residuals, solver, start, max_steps=64, throw=False).value

    return (solve,)


def roots():
    def solve(y):
        solver = optx.Newton(1e-5, 1e-5)
        return optx.root_find(lambda x, _: x**3 + x - y, solver, y, throw=False).value

    return (solve,)


def batched():
    def solve(a, y):
        def one(m, v):
            return lx.linear_solve(lx.MatrixLinearOperator(m @ m.T + jnp.eye(3)), v).value

        return jax.vmap(one)(a, y)

    return (solve,)


def tridiagonal():
    def solve(y):
        n = y.shape[0]
        operator = lx.TridiagonalLinearOperator(
            jnp.full(n, 4.0), jnp.full(n - 1, 1.0), jnp.full(n - 1, 1.0)
        )
        return lx.linear_solve(operator, y).value

    return (solve,)


TIMES = ({"t": 6}, {"t": 8}, {"t": 11})
SYSTEMS = ({"n": 6}, {"n": 8}, {"n": 11})


def _system(name, build):
    return Model(name, build, (floats("n, 3"), floats("n")), SYSTEMS, tolerance=1e-4)


MODELS = [
    Model("ODE, adaptive, one per row", adaptive, (floats("b, 3"),)),
    Model("ODE, adaptive, the batch as one system", whole_batch, (floats("b, 3"),), way="paired"),
    Model(
        "neural ODE saved at open times, gradient",
        neural_ode,
        (sorted_floats("t"), floats("3"), floats("t, 3")),
        TIMES[:2],
        way="paired",
    ),
    Model("controlled equation", controlled, (sorted_floats("t"), floats("t, 3")), TIMES),
    _system("lineax QR least squares", least_squares),
    _system("lineax Cholesky", definite),
    _system("lineax conjugate gradients", iterative),
    _system("lineax conjugate gradients of a Jacobian", jacobian),
    Model(
        "optimistix Levenberg-Marquardt",
        fit,
        (sorted_floats("n"), uniform("n", 1.0, 2.0)),
        SYSTEMS,
        tolerance=1e-3,
    ),
    Model("optimistix Newton", roots, (floats("n"),), SYSTEMS, tolerance=1e-4),
    Model(
        "lineax, one small solve per row",
        batched,
        (floats("b, 3, 3"), floats("b, 3")),
        tolerance=1e-4,
    ),
    Model("lineax tridiagonal", tridiagonal, (floats("n"),), SYSTEMS, tolerance=1e-4),
]
