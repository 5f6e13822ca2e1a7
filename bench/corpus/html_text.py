"""Takes the text of HTML pages and of DocBook: the main part, with the signs of Markdown for headings and lists."""

from __future__ import annotations

import html
import re

from bench.corpus.errors import Dropped

INLINE_TAGS = re.compile(
    r"(?i)</?(?:span|a|code|tt|b|i|em|strong|font|small|big|sup|sub|kbd|var|samp|cite|abbr|img|u|acronym|wbr|nobr|label"
    r"|input|dfn|q|s|ins|del|mark|time|col|colgroup|thead|tbody|tfoot|th|td|link|meta)\b[^>]*>"
)
HIDDEN = re.compile(
    r"(?is)<(script|style|nav|footer|svg|head|button|select|template|noscript)\b.*?</\1\s*>|<!--.*?-->|<\?.*?\?>"
    r"|<!\[CDATA\[|\]\]>"
)
CELL_END = re.compile(r"(?i)</t[dh]\s*>")
TAG = re.compile(r"<(/?)([A-Za-z][\w:.-]*)[^<>]*>")
VERBATIM = re.compile(r"(?is)<(pre|programlisting|screen|literallayout)\b[^>]*>(.*?)</\1\s*>")
MAIN_PARTS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r'<main\b[^>]*>|<div\b[^>]*role="main"[^>]*>',
        r"<article\b[^>]*>",
        r'<div\b[^>]*class="(?:body|contents|refentry|book)"[^>]*>',
    )
]
"""How the text of a page starts, without its navigation; the most certain sign first."""
MAIN_END = re.compile(
    r'(?i)<(?:/main|/article|footer)\b[^>]*>|<div\b[^>]*class="(?:sphinxsidebar|clearer|navfooter|footer)"[^>]*>'
)
BREAKS = {
    **dict.fromkeys(("p", "table", "section", "blockquote", "para", "simpara", "hr", "body"), ("\n\n", "\n\n")),
    **dict.fromkeys(("ul", "ol", "dl"), ("\n", "\n\n")),
    **dict.fromkeys(("div", "tr", "dd", "br", "varlistentry"), ("\n", "\n")),
    **dict.fromkeys(("li", "listitem", "item"), ("\n- ", "\n")),
    **dict.fromkeys(("dt", "term"), ("\n\n", "\n")),
    **{f"h{level}": ("\n\n" + "#" * level + " ", "\n\n") for level in range(1, 7)},
    "title": ("\n\n# ", "\n\n"),
}
"""What a tag and its end become: line ends, and the signs of Markdown for headings and lists."""


def strip_html(text: str) -> str:
    """Take the text of a page's main part. Blocks of code are marked as in Markdown."""
    text = HIDDEN.sub(" ", text)
    for pattern in MAIN_PARTS:
        if start := pattern.search(text):
            text = text[start.end() :]
            if end := MAIN_END.search(text):
                text = text[: end.start()]
            break
    pieces, position = [], 0
    for block in VERBATIM.finditer(text):
        pieces.append(_join_lines(text[position : block.start()]))
        code = html.unescape(TAG.sub("", INLINE_TAGS.sub("", block[2]))).strip("\n")
        pieces.append(f"\n\n```\n{code}\n```\n\n")
        position = block.end()
    return "".join([*pieces, _join_lines(text[position:])])


def _join_lines(markup: str) -> str:
    """Line ends of HTML mean nothing; those of the result are the ends of blocks."""
    markup = INLINE_TAGS.sub("", CELL_END.sub(" ", re.sub(r"\s+", " ", markup)))
    text = TAG.sub(lambda tag: BREAKS.get(tag[2].lower(), ("", ""))[bool(tag[1])], markup)
    text = re.sub("[¶\u200b\u00ad\uf0c1]", "", html.unescape(text)).replace("\u00a0", " ")
    text = "\n".join(" ".join(line.split()) for line in text.split("\n"))
    return re.sub(r"\n-\n+", "\n- ", text)  # a paragraph in an item of a list


def strip_docbook(text: str) -> str:
    """Take the text of DocBook or Mallard, and drop other XML."""
    start = re.search(r"(?i)<(book|article|chapter|page|refentry|sect1|section|part|appendix)\b", text[:5000])
    if start is None:
        raise Dropped("data")
    return strip_html(text[start.start() :])
