"""MkDocs hook (named in mkdocs.yml): shows the pages on the site as the code host shows them in the repository.

- README.md, CONTRIBUTING.md and CHANGELOG.md become pages of the site, without a second copy in docs/.
- Files outside docs/ that a page links to (an example, a source file) are copied as text to source/.
- Lists and tables may follow a line of text without an empty line, and two spaces indent an item.
  Python-Markdown alone needs an empty line and four spaces.
- Headings have the code host's anchors, so a link to a heading works in both places.
"""

from __future__ import annotations

import posixpath
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
    """Two spaces indent the content of a list item."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.tab_length = 2


def slug(heading: str, separator: str = "-") -> str:
    """Return the anchor of a heading: lower case, without punctuation, a hyphen for every space."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def on_config(config: Any) -> Any:
    config.markdown_extensions.append(Indents())
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Files, config: Any) -> Files:
    for name, path in OUTSIDE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    for page in [ROOT / path for path in OUTSIDE.values()] + sorted((ROOT / "docs").rglob("*.md")):
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
        if not name:
            return match[0]
        return f"{match[1]}{posixpath.relpath(name, posixpath.dirname(page.file.src_uri) or '.')}{match[3]}"

    return "\n".join(separate_blocks(LINK.sub(rewrite, markdown).splitlines()))


def linked(page: Path) -> list[Path]:
    """Return the files that a page links to."""
    targets = [(page.parent / match[2]).resolve() for match in LINK.finditer(page.read_text()) if ":" not in match[2]]
    return [target for target in targets if target.is_file()]


def source_name(target: Path) -> str | None:
    """Return the path on the site of a file outside docs/, or None for pages and pictures."""
    if target.is_relative_to(ROOT / "docs") or not target.is_relative_to(ROOT) or target.suffix == ".md":
        return None
    return f"source/{target.relative_to(ROOT).as_posix()}.txt"


def separate_blocks(lines: list[str]) -> list[str]:
    """Insert an empty line where a list, a table or another item starts directly below a paragraph."""
    result: list[str] = []
    fence = separated = False  # inside a code block; an empty line since the last item started
    for line in lines:
        before = result[-1] if result else ""
        item = ITEM.match(line)
        continues = not before.strip() or before.startswith(("|", "#")) or ITEM.match(before)
        continues = continues or (before.startswith(" ") and not separated)
        if (
            not fence
            and (item or line.lstrip().startswith("|"))
            and not continues
            and not before.lstrip().startswith("|")
        ):
            result.append("")
        fence ^= line.lstrip().startswith("```")
        separated = not item and (separated or not line.strip())
        result.append(line)
    return result
