"""Run every ```python block of the given Markdown files, in order, one namespace a file.

A block is run exactly as a reader would paste it, in an empty working directory. A block that
raises fails the run with the file and line. Where an ```output block stands right behind it, that
is what it has to print; `...` stands for anything, as in doctest.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path

BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n*```output\n(.*?)^```)?", re.MULTILINE | re.DOTALL)


def run(path: Path) -> int:
    """Execute the blocks of one file; returns how many there were."""
    text = path.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__"}
    count = 0
    for match in BLOCK.finditer(text):
        count += 1
        line = text[: match.start()].count("\n") + 1
        # Blank lines in front keep the line numbers of a traceback those of the Markdown file.
        code = compile("\n" * line + match.group(1), str(path), "exec")
        promised, printed = match.group(2), io.StringIO()
        quiet = contextlib.redirect_stdout(printed) if promised else contextlib.nullcontext()
        try:
            with quiet:
                exec(code, namespace)
        except BaseException:
            traceback.print_exc()
            sys.exit(f"{path}:{line}: this example fails")
        if promised and not _as_promised(promised, printed.getvalue()):
            shown = f"{path}:{line}: the page says\n{promised}and this was printed\n"
            sys.exit(shown + printed.getvalue())
    return count


def _as_promised(promised: str, printed: str) -> bool:
    return doctest.OutputChecker().check_output(promised, printed, doctest.ELLIPSIS)


def main() -> None:
    """Run the files named on the command line."""
    paths = [Path(name).resolve() for name in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for path in paths:
            count = run(path)
            if not count:
                sys.exit(f"{path}: has no ```python example to run")
            print(f"{path.parent.name}/{path.name}: {count} example(s) ran")
        os.chdir("/")


if __name__ == "__main__":
    main()
