"""Precision of the linter on public scripts, compared with verdicts of a reader.

usage: python bench/lint_judged.py FOLDER [--new] [--experts]

FOLDER has a checkout ``owner+name`` for every repository of bench/results/lint-judged.json, at the commit named there.
The files listed there are linted again. Findings without a verdict are printed with ``--new``, and counted without it.
``--experts`` uses bench/results/lint-judged-experts.json instead, and the rules about mixtures of experts only.
"""

import collections
import json
import sys
import time
from pathlib import Path

from narrowgauge.errors import UsageError
from narrowgauge.findings import Finding
from narrowgauge.lint import script
from narrowgauge.lint.settings import Settings

JUDGED = Path(__file__).parent / "results" / "lint-judged.json"
JUDGED_EXPERTS = JUDGED.with_name("lint-judged-experts.json")
EXPERT_RULES = ("low-precision-router", "counts-16bit", "expert-loop")
Key = tuple[str, str, int, int, str]
"""Repository, file, cell (0 for scripts), line, rule."""


def main() -> None:
    folder = Path(sys.argv[1])
    experts = "--experts" in sys.argv
    data = json.loads((JUDGED_EXPERTS if experts else JUDGED).read_text())
    verdicts: dict[Key, str] = {
        (one["repository"], one["file"], one.get("cell", 0), one["line"], one["rule"]): one["verdict"]
        for one in data["findings"]
    }
    begin = time.process_time()
    found: dict[Key, Finding] = {}
    missing = 0
    for name, about in data["repositories"].items():
        for file in about["files"]:
            path = folder / name.replace("/", "+") / file
            missing += not path.is_file()
            findings = [one for one in findings_of(path) if not experts or one.rule in EXPERT_RULES]
            found |= {key_of(name, file, finding): finding for finding in findings}
    seconds = time.process_time() - begin
    files = sum(len(about["files"]) for about in data["repositories"].values())
    print(f"{files - missing} of {files} files of {len(data['repositories'])} repositories, {seconds:.0f} s")
    show(found, verdicts)
    new = [key for key in found if key not in verdicts]
    gone = collections.Counter(verdict for key, verdict in verdicts.items() if key not in found)
    print(f"without a verdict: {len(new)}; judged and no longer found: {dict(gone) or 0}")
    for name, file, cell, line, rule in new if "--new" in sys.argv else ():
        print(f"  {name}/{file}:{f'cell {cell}:' if cell else ''}{line} {rule}")


def findings_of(path: Path) -> list[Finding]:
    """Return the findings in a file; a file that cannot be parsed is a finding."""
    if not path.is_file():
        return []
    try:
        return script.check(path)
    except UsageError as error:
        return [script.unreadable(path, error)]


def key_of(name: str, file: str, finding: Finding) -> Key:
    """Return what identifies a finding."""
    span = finding.span
    return name, file, (span.cell or 0) if span else 0, span.line if span else 0, finding.rule


def show(found: dict[Key, Finding], verdicts: dict[Key, str]) -> None:
    """Print the verdicts on what is found, per rule, for findings that fail CI, and overall."""
    fails, rules = Settings().fails, collections.defaultdict[str, collections.Counter[str]](collections.Counter)
    for key, finding in found.items():
        if key in verdicts:
            fail = "fails CI" if fails(finding) else "does not fail CI"
            for row in (f"{finding.rule} ({finding.severity})", f"all that {fail}", "all"):
                rules[row][verdicts[key]] += 1
    print(f"{'rule':40} {'true':>6} {'debatable':>10} {'false':>6}  precision")
    for row in sorted(rules, key=lambda row: (row.startswith("all"), row)):
        count = rules[row]
        share = count["true"] / count.total()
        print(f"{row:40} {count['true']:6} {count['debatable']:10} {count['false']:6}  {share:9.1%}")


if __name__ == "__main__":
    main()
