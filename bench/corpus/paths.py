"""Which files of a package are read, by their paths: the types of text, and paths that are skipped."""

from __future__ import annotations

import re

MARKUP = {"html", "htm", "xhtml"}
DOCBOOK = {"xml", "docbook", "page"}
PLAIN = {"txt", "rst", "md", "markdown", "pod", "texi", "texinfo", "adoc", "asciidoc", "schelp", "dict", "text", "org"}
CODE = {
    "py", "c", "h", "cc", "cpp", "cxx", "hpp", "hh", "js", "ts", "go", "rs", "java", "rb", "pl", "pm", "lua", "el",
    "lisp", "scm", "rkt", "hs", "ml", "erl", "hrl", "ex", "jl", "sql", "tcl", "pas", "adb", "ads", "f90", "php", "vim",
    "sh", "cmake", "proto",
}  # fmt: skip
LANGUAGES = (
    "ar|bg|bn|ca|cs|da|de|el|eo|es|et|eu|fa|fi|fr|gl|he|hi|hr|hu|id|it|ja|ko|lt|lv|mk|nb|nl|nn|no|oc|pa|pl|pt|ro|ru|sk|"
    "sl|sr|sv|ta|te|th|tr|uk|vi|zh"
)
SKIPPED_PATHS = re.compile(
    r"(?i)(^|/)(licen[cs]es?|copying|copyright|authors|contributors|credits|thanks|maintainers)([._-][^/]*)?$"
    r"|change_?log|(^|/)changes([._-][^/]*)?$|package-lock|yarn\.lock|poetry\.lock|\.min\.js"
    # Translations, copies of other projects, data of tests, sources of pages that are also there as HTML.
    r"|/(locales?|po|i18n|l10n|vendor|_?vendored|node_modules|third_party|_static|_images|_modules|_sources)/"
    r"|/(fixtures?|testdata|test[_-]data|snapshots|__snapshots__|goldens?)/"
    rf"|/({LANGUAGES})([_-][a-z]{{2,4}})?/|[._-]({LANGUAGES})([_-][a-z]{{2}})?\.(x?html?|txt|md|xml|utf-?8)(\.gz)?$"
    r"|/linux-doc-[\d.]+/html/"
    # Indexes and lists of names, as Sphinx, Doxygen and javadoc make them.
    r"|genindex|modindex|/search\.html|/(allclasses|overview-tree|package-tree|constant-values|index-\d+)[^/]*\.html"
    r"|-members\.html|_source\.html|/dir_[0-9a-f]+\.html|/(struct|class|union|group|namespace)\w*_\w*\.html"
    r"|/(functions|globals|classes|annotated|hierarchy|namespaces?|namespacemembers|files|inherits|modules)(_\w+)*\.html"
)


def classify(path: str) -> str | None:
    """Return the type of a file by its path: an ending of the sets above, man or info. None: not a known text."""
    name = re.sub(r"\.[gd]z$", "", path.rsplit("/", 1)[-1].lower())
    if "/man/" in path:
        return "man" if "/man/man" in path else None  # the others are translations
    if re.search(r"\.info(-\d+)?$", name):
        return "info"
    ending = name.rpartition(".")[2] if "." in name else ""
    if ending in MARKUP | DOCBOOK | PLAIN | CODE:
        return ending
    return "txt" if ("/fortunes/" in path and not ending) or name.startswith("readme") else None
