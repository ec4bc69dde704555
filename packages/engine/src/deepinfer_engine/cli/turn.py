"""Showing one streamed answer in the terminal, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from deepinfer_engine.cli.client import ChatSource


@dataclass(slots=True)
class Turn:
    """One answer as it arrived; times are seconds from the question."""

    content: str = ""
    reasoning: str = ""
    finish: str = ""
    ttft_s: float | None = None
    total_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict[str, Any])

    def summary(self) -> str:
        """`312 prompt tokens (256 cached), 40 out, first after 85 ms, all in 0.42 s`.

        No rate: a short answer arrives in one or two bursts, and a rate would tell of those.
        """
        prompt, out = self.usage.get("prompt_tokens", 0), self.usage.get("completion_tokens", 0)
        cached = self.usage.get("prompt_cache_hit_tokens", 0)
        parts = [f"{prompt} prompt tokens ({cached} cached)", f"{out} out"]
        if self.ttft_s is not None:
            parts.append(f"first after {1000 * self.ttft_s:.0f} ms")
            parts.append(f"all in {self.total_s:.2f} s")
        if self.finish not in ("stop", ""):
            parts.append(f"ended by {self.finish}")
        return ", ".join(parts)


async def show_turn(
    source: ChatSource,
    body: dict[str, Any],
    out: Console,
    clock: Callable[[], float] = time.monotonic,
) -> Turn:
    """Stream one answer to `out`, thinking dimmed, and return it."""
    turn, began = Turn(), clock()
    async for chunk in source.stream(
        {**body, "stream": True, "stream_options": {"include_usage": True}}
    ):
        turn.usage = chunk.get("usage") or turn.usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            turn.finish = choice.get("finish_reason") or turn.finish
            thought, said = delta.get("reasoning_content") or "", delta.get("content") or ""
            if (thought or said) and turn.ttft_s is None:
                turn.ttft_s = clock() - began
            if thought:
                out.print(Text(thought, style="dim italic"), end="")
            if said:
                if turn.reasoning and not turn.content:
                    out.print()
                out.print(Text(said), end="")
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                out.print(
                    Text(function.get("name") or function.get("arguments", ""), style="cyan"),
                    end="",
                )
            turn.reasoning += thought
            turn.content += said
    turn.total_s = clock() - began
    out.print()
    return turn
