"""The sandbox of chat templates. Imported on first use: Jinja takes a while to load."""

from __future__ import annotations

import json
from typing import Any

from jinja2 import nodes
from jinja2.environment import Template
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from deepinfer_recipe.base.errors import TemplateUnusableError


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: no escapes for HTML."""
    if indent is not None and not 0 <= indent <= 64:
        raise TemplateUnusableError(f"tojson: indent is 0..64, got {indent!r}")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    by = width if isinstance(width, str) else " " * min(int(width), 64)
    lines = str(text).splitlines()
    shown = [line if not line and not blank else by + line for line in lines]
    if lines and not first:
        shown[0] = lines[0]
    return "\n".join(shown)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote; to a prompt it adds nothing."""

    tags = frozenset(("generation",))  # type: ignore[assignment]

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))
    denied = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs", "format_map"))
    max_chars = 0

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in self.denied and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._check(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _check(self, operator: str, left: Any, right: Any) -> None:
        sized = [len(x) for x in (left, right) if isinstance(x, str | list | tuple)]
        count = sum(sized)
        if operator == "*" and sized:
            numbers = [x for x in (left, right) if isinstance(x, int)]
            count = sized[0] * max(1, numbers[0] if numbers else 1)
        elif operator == "**" or (operator == "*" and not sized):
            big = any(isinstance(x, int) and abs(x) > 2**64 for x in (left, right))
            if big or (operator == "**" and isinstance(right, int) and right > 64):
                raise TemplateUnusableError("the chat template computes with huge numbers")
        elif operator == "%" and isinstance(left, str):
            raise TemplateUnusableError("the chat template formats with `%`, which is refused")
        if count > self.max_chars:
            raise TemplateUnusableError(
                f"the chat template makes more than {self.max_chars} characters"
            )

    def _parse(self, source: str, name: Any, filename: Any) -> Any:
        tree = super()._parse(source, name, filename)
        for kind in (nodes.For, nodes.Macro, nodes.CallBlock):
            for node in tree.find_all(kind):
                node.body.insert(0, nodes.Output([_call("step", [], node.lineno)]))
        _count_concatenations(tree)
        return tree


def _call(name: str, arguments: list[Any], line: int) -> Any:
    function = nodes.Name(f"__{name}", "load", lineno=line)
    return nodes.Call(function, arguments, [], None, None, lineno=line)


def _count_concatenations(tree: Any) -> None:
    """Replace every `a ~ b` by a call that counts."""

    def visit(node: Any) -> None:
        for field, value in list(node.iter_fields()):
            if isinstance(value, list):
                setattr(node, field, [changed(item) for item in value])
            else:
                setattr(node, field, changed(value))

    def changed(value: Any) -> Any:
        if not isinstance(value, nodes.Node):
            return value
        visit(value)
        if isinstance(value, nodes.Concat):
            return _call("joined", list(value.nodes), value.lineno)
        return value

    visit(tree)


def compiled(source: str, max_chars: int) -> Template:
    """A template for values of at most `max_chars` characters. Raises Jinja's errors."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    for name in ("center", "format", "pprint", "random", "urlize", "wordwrap", "xmlattr"):
        environment.filters.pop(name, None)
    environment.filters |= {"tojson": _tojson, "indent": _indent}
    for name in ("lipsum", "cycler", "joiner"):
        environment.globals.pop(name, None)
    environment.max_chars = max_chars
    return environment.from_string(source)
