"""Links in the documentation work, every page is in the navigation, and the site shows the content of the pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from doc_blocks import ROOT, pages
from markdown_it import MarkdownIt

import narrowgauge

PAGES = [*pages(), ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
API_PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
GENERATED = {"index.md", "changelog.md", "contributing.md"}
"""Pages of the site that docs/make_site.py makes from files in the repository's root."""
NEEDS_MKDOCS = pytest.mark.skipif(find_spec("mkdocstrings") is None, reason="mkdocstrings is not installed")


@cache
def parsed(page: Path):
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def inline(page: Path):
    for token in parsed(page):
        yield from token.children or ()


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the code host makes them."""
    tokens = parsed(page)
    headings = [tokens[i + 1] for i, token in enumerate(tokens) if token.type == "heading_open"]
    found: set[str] = set()
    for heading in headings:
        text = "".join(child.content for child in heading.children if child.type in ("text", "code_inline"))
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        again = sum(name == slug or name.startswith(f"{slug}-") for name in found)
        found.add(f"{slug}-{again}" if slug in found else slug)
    return found


@pytest.mark.parametrize("page", [*PAGES, *API_PAGES], ids=lambda page: page.name)
def test_links_have_targets(page):
    wrong = []
    for token in inline(page):
        target = str(token.attrs.get("href") or token.attrs.get("src") or "")
        if not target or re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            wrong.append(f"{target}: there is no {file}")
        elif anchor and (file.suffix != ".md" or anchor not in anchors(file)):
            wrong.append(f"{target}: {file.name} has no such heading; it has {', '.join(sorted(anchors(file)))}")
    assert not wrong, "\n".join(wrong)


def nav_files(part) -> list[str]:
    if isinstance(part, str):
        return [part]
    inner = part.values() if isinstance(part, dict) else part
    return [file for item in inner for file in nav_files(item)]


def test_the_navigation_lists_every_page_once():
    named = nav_files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    there = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")} | GENERATED
    assert sorted(named) == sorted(there)


def test_the_documented_layers_are_the_tested_ones():
    """docs/inside.md shows the layers that tests/test_architecture.py checks, in the same order."""
    space: dict[str, object] = {}
    text = (ROOT / "tests" / "test_architecture.py").read_text()
    exec(text[text.index("LAYERS = [") : text.index("LAYER_OF")], space)
    drawing = re.search(r"```text\n(   cli.*?)```", (ROOT / "docs" / "inside.md").read_text(), re.DOTALL)[1]
    rows = [set(row.split()) for row in drawing.splitlines() if row.strip() != "|"]
    layers = [layer for layer in space["LAYERS"] if layer != {"__main__"}]
    assert len(rows) == len(layers)
    for row, layer in zip(rows, layers, strict=True):
        assert layer <= row


class Counter(HTMLParser):
    """Counts elements and collects the URLs that a browser would fetch, only within <article> if there is one."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.count: dict[str, int] = {}
        self.fetched: list[str] = []
        self.inside = not (within := "<article" in text)
        self.within = within
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        if tag == "article":
            self.inside = True
        if self.inside:
            self.count[tag] = self.count.get(tag, 0) + 1
        if tag in ("script", "img", "iframe", "source") and named.get("src"):
            self.fetched.append(named["src"])
        if tag == "link" and named.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.fetched.append(named["href"])

    def handle_endtag(self, tag):
        if tag == "article" and self.within:
            self.inside = False


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site as ``make docs`` does; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    arguments = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


@NEEDS_MKDOCS
def test_the_site_shows_what_the_pages_contain(site):
    assert (site / "search" / "search_index.json").stat().st_size > 100_000
    names = {ROOT / "README.md": "index", ROOT / "CHANGELOG.md": "changelog", ROOT / "CONTRIBUTING.md": "contributing"}
    for page in PAGES:
        shown = Counter((site / f"{names.get(page, page.stem)}.html").read_text())
        outside = [address for address in shown.fetched if re.match(r"(https?:)?//", address)]
        assert not outside, f"{page.name} fetches {outside}"
        written = Counter(MarkdownIt("commonmark").enable("table").render(page.read_text()))
        for tag in ("li", "table", "tr", "pre", "h2", "h3", "img"):
            same = (shown.count.get(tag, 0), written.count.get(tag, 0))
            assert same[0] == same[1], f"{page.name}: {same[0]} <{tag}> on the site, {same[1]} in the repository"
    assert not list(site.rglob("*.py"))


@NEEDS_MKDOCS
def test_the_api_reference_has_every_public_name(site):
    """Names as ``ng.NAME``, and their public methods; mkdocstrings gives each an anchor."""
    anchors = set()
    for page in API_PAGES:
        html = (site / "api" / f"{page.stem}.html").read_text()
        assert not re.search(r'(src|href)="(https?:)?//[^"]*\.(js|css|woff2?)"', html), page.name
        anchors |= {anchor.rpartition(".")[2] for anchor in re.findall(r'id="(narrowgauge\.[\w.]+)"', html)}
    modules = {"block_formats", "formats", "gauges", "hardware", "optim"}
    wanted = {"parse" if name == "recipe" else name for name in narrowgauge.__all__} - modules
    wanted |= {name for name in dir(narrowgauge.Engine) if not name.startswith("_")}
    wanted |= {name for name in vars(narrowgauge.LossScaler) if not name.startswith("_")}
    assert not wanted - anchors, f"not in the API reference: {sorted(wanted - anchors)}"
