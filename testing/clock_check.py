"""Finds assertions on how much time passed: on a busy machine they fail though nothing is wrong.

A difference of two clock readings, or a name or attribute that holds one, must not stand in an
`assert` or be handed to `pytest.approx`. A deadline (`assert monotonic() < end`, where `end` was
a reading plus seconds) ends runaway work and is allowed: its failure says that nothing happened.
Run as a script on test folders it prints `file:line: text` for each finding and exits with 1.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

CLOCKS = frozenset(
    {
        "monotonic",
        "monotonic_ns",
        "perf_counter",
        "perf_counter_ns",
        "process_time",
        "process_time_ns",
        "thread_time",
        "thread_time_ns",
        "cpu_times",
    }
)


def reads_clock(node: ast.AST) -> bool:
    """Whether the expression calls a clock, such as `time.monotonic()`."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            name = part.func.attr if isinstance(part.func, ast.Attribute) else part.func
            name = name.id if isinstance(name, ast.Name) else name
            if name in CLOCKS:
                return True
            # time.time(), but not clock.time() of an injected clock
            if name == "time" and ast.unparse(part.func) == "time.time":
                return True
    return False


class Findings(ast.NodeVisitor):
    """Follows clock readings by name through one function."""

    def __init__(self) -> None:
        self.readings: set[str] = set()
        self.spans: set[str] = set()  # names that hold a difference of readings
        self.found: list[ast.Assert] = []

    def is_reading(self, node: ast.AST) -> bool:
        return reads_clock(node) or any(
            isinstance(part, ast.Name) and part.id in self.readings for part in ast.walk(node)
        )

    def is_span(self, node: ast.AST) -> bool:
        for part in ast.walk(node):
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub):
                if self.is_reading(part.left):
                    return True
            elif isinstance(part, ast.Name | ast.Attribute) and ast.unparse(part) in self.spans:
                return True
        return False

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name | ast.Attribute):
                name = ast.unparse(target)
                if self.is_span(node.value):
                    self.spans.add(name)
                elif reads_clock(node.value):
                    self.readings.add(name)
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        if self.is_span(node.test):
            self.found.append(node)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions that stand in no other function; what is nested shares names with its host."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        else:
            waiting += ast.iter_child_nodes(node)


def check(source: str) -> list[tuple[int, str]]:
    """Line and text of each assertion on time in a file."""
    rows = []
    for function in functions(ast.parse(source)):
        findings = Findings()
        findings.visit(function)
        rows += [(node.lineno, ast.unparse(node)) for node in findings.found]
    return sorted(rows)


def main(folders: list[str]) -> int:
    count = 0
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.py")):
            for line, text in check(path.read_text(encoding="utf-8")):
                print(f"{path}:{line}: {text[:110]}")
                count += 1
    if count:
        print(f"{count} assertion(s) on time: use an injected clock, an event, or a count of work")
    return count > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
