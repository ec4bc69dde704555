"""Commands about prompts."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.ops.cli.output import AsJson
from deepinfer_kvtier.ops.explain import explain_texts, explain_tokens, read_prompt


def explain(
    a: Annotated[Path, typer.Argument(help="First prompt: JSON token ids, or text.")],
    b: Annotated[Path, typer.Argument(help="Second prompt.")],
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 128,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json for texts; needs the package tokenizers.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Name the first token that differs and the block from which everything is computed again."""
    first, second = read_prompt(a), read_prompt(b)
    if isinstance(first, str) and isinstance(second, str):
        if tokenizer is None:
            result = explain_texts(first, second)
        else:
            encode = _tokenizer(tokenizer)
            result = explain_tokens(encode(first), encode(second), block_tokens)
    elif isinstance(first, list) and isinstance(second, list):
        result = explain_tokens(first, second, block_tokens)
    else:
        raise ConfigError("one file holds token ids and the other text: give two of a kind")
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
    else:
        typer.echo("\n".join(result.sentences()))


def _tokenizer(path: Path) -> Callable[[str], list[int]]:
    try:
        tokenizers: Any = importlib.import_module("tokenizers")
    except ImportError:
        wanted = "--tokenizer needs the extra: pip install './packages/kvtier[explain]'"
        raise ConfigError(wanted) from None
    try:
        loaded: Any = tokenizers.Tokenizer.from_file(str(path))
    except Exception as cause:
        raise ConfigError(f"cannot read the tokenizer {path}: {cause}") from cause

    def encode(text: str) -> list[int]:
        return list(loaded.encode(text).ids)

    return encode
