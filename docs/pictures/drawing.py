"""What the pictures share: boxes, lines and text in colours that read on light and on dark."""

from __future__ import annotations

from collections.abc import Iterable

DATA, PADDING, GOOD, INK = "#3b82c9", "#a97a2e", "#2a8a5f", "#777f89"


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    """A filled rectangle with its upper left corner at ``x, y``."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
        f'fill="{colour}" stroke="{INK}" stroke-width="0.6"/>'
    )


def line(x1: float, y1: float, x2: float, y2: float, dashes: str = "none", width: float = 1) -> str:
    """A straight line; ``dashes`` as SVG writes them."""
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" '
        f'stroke="{INK}" stroke-width="{width:g}" stroke-dasharray="{dashes}"/>'
    )


def text(
    x: float,
    y: float,
    words: object,
    size: int = 14,
    weight: str = "normal",
    anchor: str = "start",
    colour: str = INK,
) -> str:
    """One line of text; ``anchor`` is what of it is at ``x``: start, middle or end."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{colour}">{words}</text>'
    )


def legend(x: float, y: float, step: float, *entries: tuple[str, str]) -> Iterable[str]:
    """Small boxes in a row, each with what its colour means."""
    for i, (colour, words) in enumerate(entries):
        yield box(x + step * i, y - 11, 12, 12, colour)
        yield text(x + step * i + 18, y, words, 13)


def document(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """The text of an SVG file without a ground; ``title`` is read to those who don't see it."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="Helvetica, Arial, sans-serif">',
            f"<title>{title}</title>",
            *parts,
            "</svg>\n",
        ]
    )
