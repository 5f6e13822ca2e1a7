"""What MkDocs does differently for this project, as a hook that mkdocs.yml names.

The pages are written to be read in the repository; the site must show them the same:

- README.md is the front page and CHANGELOG.md the last one, from where they are, so that neither exists twice;
- files outside of docs/ that a page links to (an example, a source file) come along, as text, under source/;
- lists and tables are read as the code host reads them: they may follow a line of text without an empty line between,
  and what belongs to an item is indented by two spaces or more (Python-Markdown wants an empty line and four);
- headings get the code host's anchors, so that a link to one holds in both places.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
ITEM = re.compile(r"\s*([-*+]|\d+[.)])\s")


class Indents(Extension):
    """Two spaces are enough."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.tab_length = 2


def slug(heading: str, separator: str = "-") -> str:
    """The anchor of a heading: small letters, without punctuation, a hyphen for every space."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def on_config(config: Any) -> Any:
    config.markdown_extensions.append(Indents())
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Files, config: Any) -> Files:
    for name, path in OUTSIDE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    for page in [ROOT / path for path in OUTSIDE.values()] + sorted((ROOT / "docs").glob("*.md")):
        for target in linked(page):
            name = source_name(target)
            if name and files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, content=target.read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    home = ROOT / OUTSIDE.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def rewrite(match: re.Match[str]) -> str:
        target = (home.parent / match[2]).resolve()
        if ":" in match[2] or not target.is_file():
            return match[0]
        moved = {str(ROOT / path): name for name, path in OUTSIDE.items()}
        inside = target.is_relative_to(ROOT / "docs")
        name = moved.get(str(target)) or (
            target.relative_to(ROOT / "docs").as_posix() if inside else source_name(target)
        )
        return f"{match[1]}{name}{match[3]}" if name else match[0]

    return "\n".join(apart(LINK.sub(rewrite, markdown).splitlines()))


def linked(page: Path) -> list[Path]:
    """The files a page links to."""
    targets = [(page.parent / match[2]).resolve() for match in LINK.finditer(page.read_text()) if ":" not in match[2]]
    return [target for target in targets if target.is_file()]


def source_name(target: Path) -> str | None:
    """Where a file of the repository stands on the site, if it is not a page or a picture already."""
    if target.is_relative_to(ROOT / "docs") or not target.is_relative_to(ROOT) or target.suffix == ".md":
        return None
    return f"source/{target.relative_to(ROOT).as_posix()}.txt"


def apart(lines: list[str]) -> list[str]:
    """The lines with an empty one where a list, a table or another item begins right below a paragraph."""
    result: list[str] = []
    fence = parted = False  # in a block of code; an empty line since the last item began
    for line in lines:
        before = result[-1] if result else ""
        item = ITEM.match(line)
        goes_on = not before.strip() or before.startswith(("|", "#")) or ITEM.match(before)
        goes_on = goes_on or (before.startswith(" ") and not parted)
        if (
            not fence
            and (item or line.lstrip().startswith("|"))
            and not goes_on
            and not before.lstrip().startswith("|")
        ):
            result.append("")
        fence ^= line.lstrip().startswith("```")
        parted = not item and (parted or not line.strip())
        result.append(line)
    return result
