"""Search blocks of a Messages history as the calls and results that the model saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfer_recipe.base.errors import ConversionError
from deepinfer_recipe.protocols.messages import body as wire


@dataclass(slots=True)
class SearchTurn:
    """One model turn of an assistant message, and the results of the server's calls in it."""

    blocks: list[wire.Block] = field(default_factory=list["wire.Block"])
    results: dict[str, str] = field(default_factory=dict[str, str])
    waiting: set[str] = field(default_factory=set[str])


def search_turns(
    blocks: Sequence[wire.Block], place: str, read: Callable[[Mapping[str, Any]], str]
) -> Iterator[SearchTurn]:
    """Cut an assistant message where the model went on after results.

    place: of the blocks, for errors; read: the model's text of a result block.
    """
    turn = SearchTurn()
    for position, block in enumerate(blocks):
        here = f"{place}[{position}]"
        if isinstance(block, wire.ServerToolUseBlock):
            turn.waiting.add(block.id)
            use = wire.ToolUseBlock(
                type="tool_use", id=block.id, name=block.name, input=block.input or {}
            )
            turn.blocks.append(use)
        elif isinstance(block, wire.WebSearchResultBlock):
            if block.tool_use_id not in turn.waiting:
                raise ConversionError(
                    f"{here}.tool_use_id: expected the id of a `server_tool_use` block before it",
                    param=f"{here}.tool_use_id",
                )
            turn.waiting.remove(block.tool_use_id)
            turn.results[block.tool_use_id] = read(block.model_dump(exclude_unset=True))
        else:
            if turn.results and not isinstance(block, wire.ToolUseBlock):
                yield _checked(turn, place)
                turn = SearchTurn()
            turn.blocks.append(block)
    if turn.blocks or not blocks:
        yield _checked(turn, place)


def _checked(turn: SearchTurn, place: str) -> SearchTurn:
    if turn.waiting:
        raise ConversionError(
            f"{place}: no `web_search_tool_result` for the uses {', '.join(sorted(turn.waiting))}",
            param=place,
        )
    return turn
