"""Hunt for models that are answered with anything but a typed error or the right result.

python -m tests.fuzz --count 100000 --seed 7 --jobs 2 --out FOLDER     hunt, print a table, write one model per find
python -m tests.fuzz MODEL ...                                         try every call on these models
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.fuzz.harness import Find, Job, hunt, verdicts, workers
from tests.fuzz.judge import CALLS, Call


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL")
    parser.add_argument("--count", type=int, default=1000, help="mutants (1000)")
    parser.add_argument("--seed", type=int, default=0, help="other mutants for each seed (0)")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes (1)")
    parser.add_argument("--shrink", type=float, default=5, help="seconds to make the model of one find smaller (5)")
    parser.add_argument("--out", type=Path, help="folder for finds.md and the models of the finds")
    given = parser.parse_args()
    if given.models:
        return replay(given.models, given.jobs)
    finds, ends = hunt(given.count, given.seed, given.jobs, shrinking=given.shrink, progress=sys.stderr.isatty())
    for word, count in sorted(ends.items(), key=lambda e: -e[1]):
        print(f"{count:8,}  {word}")
    print(f"\n{len(finds)} finds")
    for number, find in enumerate(finds):
        print(
            f"{find.count:6,}  {find.verdict.kind}\n        {find.verdict.place}\n        {find.job.call}: {number:03}.onnx"
        )
    if given.out:
        write(given.out, finds)
    return 1 if finds else 0


def write(folder: Path, finds: list[Find]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["| file | count | kind | place | call | mutant | text |", "|---|---|---|---|---|---|---|"]
    for number, find in enumerate(finds):
        (folder / f"{number:03}.onnx").write_bytes(find.job.data)
        v, text = find.verdict, " ".join(find.verdict.text.split()).replace("|", "/")
        lines.append(f"| {number:03} | {find.count} | {v.kind} | {v.place} | {find.job.call} | {find.index} | {text} |")
    (folder / "finds.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def replay(models: list[Path], jobs: int) -> int:
    """Try every call on each model, in every form."""
    tasks = [
        (path, Job(path.read_bytes(), Call(name, form)))
        for path in models
        for name in CALLS
        for form in ("proto", "path", "ir")
    ]
    worst = 0
    with workers(jobs) as pool:
        for path, job in tasks:
            [(_, verdict, _)] = verdicts(pool[:1], [job])
            worst = max(worst, int(verdict.find))
            print(f"{path.name}: {job.call}: {verdict.kind} {verdict.place} {verdict.text[:200]}")
    return worst


if __name__ == "__main__":
    sys.exit(main())
