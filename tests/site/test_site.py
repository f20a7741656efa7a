"""The documentation site in a browser, as its readers see it: `make docs-browser`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urldefrag

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

DESK = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
JOURNEYS = [f"journeys/{name}.html" for name in ("train", "embed", "serve", "generate")]
PICTURED = ["index", "journeys/train", "reference/index", "benchmarks", "coverage"]

LOOK = Path(__file__).with_name("look.js").read_text()


def look(page: Page, function: str) -> Any:
    """What a function of ``look.js`` finds in a page."""
    return page.evaluate(f"() => {{ {LOOK}\nreturn {function}(); }}")


@dataclass
class Visit:
    """What one page showed and asked for."""

    title: str = ""
    ids: set[str] = field(default_factory=set)
    links: set[str] = field(default_factory=set)
    pale: dict[str, dict[str, str]] = field(default_factory=dict)
    broken: dict[str, list[str]] = field(default_factory=dict)
    width: int = 0
    wide: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def _listen(context: BrowserContext, visit: Callable[[], Visit]) -> None:
    """Writes requests and errors into the visit that is under way."""
    context.on("request", lambda request: visit().asked.append(request.url))
    context.on(
        "requestfailed", lambda request: visit().wrong.append(f"{request.url}: {request.failure}")
    )
    context.on(
        "response",
        lambda answer: (
            visit().wrong.append(f"{answer.url}: {answer.status}") if answer.status >= 400 else None
        ),
    )
    context.on("weberror", lambda error: visit().wrong.append(str(error.error)))
    context.on(
        "console",
        lambda message: visit().wrong.append(message.text) if message.type == "error" else None,
    )


@pytest.fixture(scope="module")
def visits(site: Path, address: str, browser: Browser) -> dict[str, Visit]:
    """Each page of the site, seen once: wide and light, dark, and as narrow as a phone."""
    paths = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    seen = {path: Visit() for path in paths if not path.startswith("_")}
    context = browser.new_context(viewport=DESK)
    under_way = Visit()
    _listen(context, lambda: under_way)
    page = context.new_page()
    for path, under_way in seen.items():
        visit = under_way
        page.set_viewport_size(DESK)
        page.goto(address + path)
        visit.title, ids, links = look(page, "inside")
        visit.ids, visit.links = set(ids), set(links)
        visit.broken["desk"] = look(page, "broken")
        page.add_style_tag(content="* { transition: none !important }")
        for theme in ("light", "dark"):
            page.evaluate("theme => { document.body.dataset.theme = theme }", theme)
            visit.pale[theme] = look(page, "pale")
        page.set_viewport_size(PHONE)
        visit.broken["phone"] = look(page, "broken")
        visit.width = look(page, "width")
        visit.wide = look(page, "wide") if visit.width > PHONE["width"] else []
    context.close()
    return seen


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of a reader who was never here, and who lets it use the clipboard."""
    context = browser.new_context(
        viewport=DESK, permissions=["clipboard-read", "clipboard-write"], reduced_motion="reduce"
    )
    yield context.new_page()
    context.close()


def test_the_front_page_leads_to_the_journeys(page: Page, address: str) -> None:
    page.goto(address)
    assert "bucketjit" in page.title()
    assert page.locator("article h1").count() == 1
    for journey in JOURNEYS:
        page.goto(address)
        page.locator(f"article a[href='{journey}']").first.click()
        page.wait_for_url(address + journey)
        assert page.locator("article h1").count() == 1


@pytest.mark.parametrize(
    ("words", "right"),
    [
        ("ragged", r"ragged_rows\.html|journeys/train\.html"),
        ("KV cache", r"journeys/generate\.html"),
        ("with_persistence", r"persistence\.html|reference/.*with_persistence"),
    ],
)
def test_a_search_finds_the_right_page(page: Page, address: str, words: str, right: str) -> None:
    page.goto(address)
    box = page.locator("input[name=q]").first
    box.fill(words)
    box.press("Enter")
    page.wait_for_url(re.compile(r"search\.html\?q="))
    page.get_by_role("heading", name="Search Results").wait_for()
    results = page.locator("#search-results li > a").evaluate_all("all => all.map(e => e.href)")
    assert any(re.search(right, url) for url in results[:3]), results[:10]


def _code(shown: str) -> str:
    """A block without prompts and, where it has prompts, without what the lines print."""
    prompt = re.compile(r"(>>>|\.\.\.|\$)(?: |$)")
    lines = shown.rstrip("\n").split("\n")
    typed = [line[found.end() :] for line in lines if (found := prompt.match(line))]
    return "\n".join(typed or lines)


@pytest.mark.parametrize(
    "path", ["index.html", "persistence.html", "reference/making.html", JOURNEYS[0]]
)
def test_a_copy_button_copies_the_code(page: Page, address: str, path: str) -> None:
    page.goto(address + path)
    blocks = page.locator("div.highlight:has(button.copybtn)")
    assert blocks.count()
    for block in blocks.all():
        page.evaluate("navigator.clipboard.writeText('nothing')")
        block.hover()
        block.locator("button.copybtn").click()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied.rstrip("\n") == _code(block.locator("pre").text_content() or "")


@pytest.mark.parametrize("name", PICTURED)
def test_a_button_makes_the_page_dark(page: Page, address: str, site: Path, name: str) -> None:
    """The page is photographed on the way: light, dark, and on a phone."""

    def photograph(look: str) -> None:
        page.screenshot(path=site.parent / "screenshots" / f"{name.replace('/', '-')}-{look}.png")

    def background() -> list[int]:
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return [int(part) for part in re.findall(r"\d+", color)[:3]]

    page.set_viewport_size(DESK | {"height": 2400})
    page.goto(f"{address}{name}.html")
    assert min(background()) > 200
    photograph("light")
    button = page.locator(".theme-toggle:visible").first
    for _ in range(3):
        if max(background()) > 80:
            button.click()
    assert max(background()) < 80
    photograph("dark")
    page.reload()
    assert max(background()) < 80, "the next page is light again"
    page.evaluate("localStorage.clear()")
    page.set_viewport_size(PHONE | {"height": 2400})
    page.reload()
    photograph("phone")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_told_from_its_background(visits: dict[str, Visit], theme: str) -> None:
    assert not {path: visit.pale[theme] for path, visit in visits.items() if visit.pale[theme]}


def test_no_page_scrolls_sideways_on_a_phone(visits: dict[str, Visit]) -> None:
    assert not {
        path: (visit.width, visit.wide)
        for path, visit in visits.items()
        if visit.width > PHONE["width"]
    }


@pytest.mark.parametrize("device", ["desk", "phone"])
def test_tables_break_no_short_word(visits: dict[str, Visit], device: str) -> None:
    assert not {path: v.broken[device] for path, v in visits.items() if v.broken[device]}


def test_no_page_has_an_error(visits: dict[str, Visit]) -> None:
    assert not {path: visit.wrong for path, visit in visits.items() if visit.wrong}


def test_no_page_asks_another_host(visits: dict[str, Visit], address: str) -> None:
    for path, visit in visits.items():
        assert address + path in visit.asked
        others = [url for url in visit.asked if not url.startswith((address, "data:", "blob:"))]
        assert not others, path


def test_every_page_has_a_title(visits: dict[str, Visit]) -> None:
    assert all(visit.title for visit in visits.values())


def test_every_link_inside_leads_somewhere(visits: Any, address: str, site: Path) -> None:
    lost = set()
    for path, visit in visits.items():
        for link in visit.links:
            if not link.startswith(address):
                continue
            url, anchor = urldefrag(link.removeprefix(address))
            target = unquote(url.split("?")[0])
            target += "index.html" if target in ("",) or target.endswith("/") else ""
            exists = (site / target).is_file()
            if not exists or (
                anchor and target in visits and unquote(anchor) not in visits[target].ids
            ):
                lost.add((path, link.removeprefix(address)))
    assert not lost
