"""The `deepinfer-recipe` command: prompts, answers and conformance without writing a program."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepinfer_recipe import __version__
from deepinfer_recipe.base.errors import RecipeError
from deepinfer_recipe.native import STATE
from deepinfer_recipe.prompts.render import RenderedPrompt
from deepinfer_recipe.prompts.tokenizer import Tokenizer
from deepinfer_recipe.protocols.table import PROTOCOLS
from deepinfer_recipe.serving.exchange import Exchange

_MARK_ON, _MARK_OFF = "\x1b[7m", "\x1b[0m"


def _read(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    return Path(path).read_bytes()


def _highlighted(rendered: RenderedPrompt) -> str:
    """The prompt with its special tokens in reverse video."""
    out: list[str] = []
    position = 0
    for start, end in rendered.special_ranges:
        out += [rendered.prompt[position:start], _MARK_ON, rendered.prompt[start:end], _MARK_OFF]
        position = end
    return "".join([*out, rendered.prompt[position:]])


def _render(options: argparse.Namespace) -> int:
    exchange = Exchange(options.protocol, _read(options.request), id="render", created=0)
    rendered = exchange.rendered
    if options.json:
        print(
            json.dumps(
                {"prompt": rendered.prompt, "special_ranges": rendered.special_ranges},
                ensure_ascii=False,
            )
        )
    elif sys.stdout.isatty() or options.color:
        print(_highlighted(rendered))
    else:
        print(rendered.prompt)
    if options.tokenizer is not None:
        count = len(exchange.encode(Tokenizer.from_file(options.tokenizer)))
        print(f"{count} tokens", file=sys.stderr)
    return 0


def _thinks(options: argparse.Namespace, text: str) -> bool:
    """Whether the output begins with thinking: as told, or as it looks, which is said."""
    if options.thinking is not None:
        return bool(options.thinking)
    thinks = "</think>" in text
    what, other = ("thinking", "--no-thinking") if thinks else ("no thinking", "--thinking")
    print(
        f"assumed {what}, since the output {'holds' if thinks else 'holds no'} </think>; "
        f"give {other} if that is wrong",
        file=sys.stderr,
    )
    return thinks


def _default_request(options: argparse.Namespace, *, thinks: bool) -> dict[str, Any]:
    """A request under which the output would have been produced."""
    effort = "high" if thinks else "none"
    tool = {"name": "any", "description": "", "parameters": {"type": "object"}}
    turn = [{"role": "user", "content": ""}]
    model = "DeepSeek-V4.1-Flash"
    if options.protocol == "chat":
        tools = [{"type": "function", "function": tool}]
        return {"model": model, "messages": turn, "tools": tools, "reasoning_effort": effort}
    if options.protocol == "responses":
        tools = [{"type": "function", **tool}]
        return {"model": model, "input": "", "tools": tools, "reasoning": {"effort": effort}}
    tools = [{"name": "any", "input_schema": tool["parameters"]}]
    thinking = {"type": "enabled" if thinks else "disabled"}
    return {"model": model, "messages": turn, "tools": tools, "thinking": thinking}


def _parse(options: argparse.Namespace) -> int:
    try:
        text = _read(options.output).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{options.output} is not UTF-8: {error}") from None
    body: bytes | dict[str, Any]
    if options.request is None:
        body = _default_request(options, thinks=_thinks(options, text))
    else:
        body = _read(options.request)
    exchange = Exchange(options.protocol, body, id="parse", created=0)
    answer = exchange.answer
    frames = answer.ready(prompt_tokens=0)
    frames += answer.text(text, tokens=0)
    frames += answer.finish(options.finish)
    if options.events:
        print("".join(frames), end="")
    else:
        print(json.dumps(exchange.response(), ensure_ascii=False, indent=2))
    for repair in answer.tool_call_repairs:
        print(f"repaired: {repair}", file=sys.stderr)
    return 0


def _check(options: argparse.Namespace) -> int:
    # Imported here: `render` and `parse` need none of it.
    from deepinfer_recipe.check.answers import OwnAnswers, ServerAnswers
    from deepinfer_recipe.check.cases import read_cases
    from deepinfer_recipe.check.run import Answers, report, run_cases

    cases = read_cases(None if options.corpus is None else Path(options.corpus))
    if options.protocol is not None:
        cases = [case for case in cases if case.protocol == options.protocol]
    if not cases:
        raise ValueError(f"there are no cases of the protocol {options.protocol}")
    answers: Answers = OwnAnswers()
    if options.url is not None:
        key = None if options.api_key_env is None else os.environ.get(options.api_key_env)
        if options.api_key_env is not None and not key:
            raise ValueError(f"the environment variable {options.api_key_env} is not set")
        answers = ServerAnswers(
            options.url, model=options.model, key=key, timeout_s=options.timeout
        )
        answers.reach()
    results = run_cases(cases, answers, is_own=options.url is None)
    print(report(results, answers.name))
    return int(any(result.problems for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepinfer-recipe",
        description="Prompts, answers and conformance of DeepSeek V4 and V4.1 models.",
    )
    parser.add_argument(
        "--version", action="version", version=f"deepinfer-recipe {__version__} ({STATE})"
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    render = commands.add_parser("render", help="show the prompt of a request body")
    render.add_argument("request", help="file with the request body as JSON, - for stdin")
    render.add_argument("--protocol", choices=tuple(PROTOCOLS), default="chat")
    render.add_argument("--tokenizer", help="tokenizer.json to count the prompt's tokens with")
    render.add_argument("--json", action="store_true", help="print prompt and ranges as JSON")
    render.add_argument("--color", action="store_true", help="highlight special tokens in a pipe")
    render.set_defaults(run=_render)
    parse = commands.add_parser("parse", help="show a model's raw output as a response")
    parse.add_argument("output", help="file with the raw output, - for stdin")
    parse.add_argument("--protocol", choices=tuple(PROTOCOLS), default="chat")
    parse.add_argument("--request", help="the request it answers; by default one with tools")
    parse.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="whether the output begins with thinking; without it and --request it is guessed",
    )
    parse.add_argument("--events", action="store_true", help="print the server-sent events")
    parse.add_argument("--finish", choices=("stop", "length", "content_filter"), default="stop")
    parse.set_defaults(run=_parse)
    check = commands.add_parser("check", help="check this library, or a server, against a corpus")
    check.add_argument("corpus", nargs="?", help=".jsonl file or folder of them; default: shipped")
    check.add_argument("--url", help="a server to check, such as http://127.0.0.1:8000")
    check.add_argument("--protocol", choices=tuple(PROTOCOLS), help="check only this one")
    check.add_argument("--model", help="model name to ask the server for")
    check.add_argument("--api-key-env", help="environment variable that holds the API key")
    check.add_argument("--timeout", type=float, default=60.0, help="seconds for one answer")
    check.set_defaults(run=_check)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; errors are one line on stderr and exit status 1."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (RecipeError, OSError, ValueError) as error:
        print(f"deepinfer-recipe: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
