"""Draws bucket plans with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bucketjit._cli.command import CommandError
from bucketjit._cli.comparison import Plan
from bucketjit.strategies import Assessment

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(
    path: str,
    sizes: Mapping[str, list[int]],
    plans: Sequence[Plan],
    k: int,
    frontier: Sequence[Assessment],
) -> None:
    """Draw the sizes with the best buckets, and executables against waste.

    Args:
        path: The file to write; its suffix chooses the format.
        sizes: The sizes seen of each variable.
        plans: The plans. The buckets of the one that wastes least are drawn.
        k: The largest number of executables of the plan whose buckets are drawn.
        frontier: The least waste by number of executables; empty to leave it out.

    Raises:
        CommandError: If matplotlib is not installed, ``path`` has no suffix, or the file cannot be
            written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise CommandError(
            "plots need matplotlib; install it with: pip install 'bucketjit[cli]'"
        ) from None
    if not Path(path).suffix:
        raise CommandError(f"cannot draw {path!r}: its ending tells the format, such as .png")
    # Not with pyplot: it keeps every figure alive, and chooses a window system.
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    affordable = [plan for plan in plans if plan.assessment.executables <= k]
    try:
        _draw_sizes(left, sizes, min(affordable, key=lambda plan: plan.assessment.waste))
        _draw_plans(right, plans, frontier)
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot draw {path}: {error}") from None


def _draw_sizes(axes: Axes, sizes: Mapping[str, list[int]], best: Plan) -> None:
    """Draw the calls and the buckets of a plan, along the first two variables."""
    dims = list(sizes)
    if len(dims) == 1:
        axes.hist(sizes[dims[0]], bins=60, color="0.7")
        for (boundary,) in best.buckets:
            axes.axvline(boundary, color="C3", linewidth=1)
        axes.set(xlabel=dims[0], ylabel="calls", title=f"sizes, and the buckets of {best.name}")
        return
    x, y = dims[:2]
    axes.scatter(sizes[x], sizes[y], s=6, color="0.6")
    for bucket in best.buckets:
        axes.plot([0, bucket[0], bucket[0]], [bucket[1], bucket[1], 0], color="C3", linewidth=1)
    axes.set(xlabel=x, ylabel=y, title=f"calls, and the buckets of {best.name}")


def _draw_plans(axes: Axes, plans: Sequence[Plan], frontier: Sequence[Assessment]) -> None:
    """Draw a point for each plan; down and to the left is better."""
    if frontier:
        needs, waste = zip(*((a.executables, 100 * a.waste) for a in frontier), strict=True)
        axes.plot(needs, waste, color="0.8", label="least possible")
    for i, plan in enumerate(plans):
        assessment = plan.assessment
        axes.scatter(assessment.executables, 100 * assessment.waste, color=f"C{i}", label=plan.name)
    axes.set(xlabel="executables", ylabel="waste, %", title="compiles against padding")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend()
