"""Chat templates: the Jinja programs that models ship, run where they can do no harm.

A template comes with a model's files, which may be anybody's. It runs in Jinja's immutable sandbox,
with the names that transformers gives it, and every loop, macro and concatenation is counted: it
ends with an error instead of never, and instead of filling memory.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer_recipe.base.errors import TemplateRefusedError, TemplateUnusableError

MAX_SOURCE_CHARS = 1 << 20


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What rendering one prompt may cost.

    max_steps: rounds of loops and calls of macros. max_chars: text of the prompt, and of any value
    on the way to it.
    """

    max_steps: int = 200_000
    max_chars: int = 16_000_000
    max_seconds: float = 5.0


DEFAULT_TEMPLATE_LIMITS = TemplateLimits()


class _Meter:
    """Counts what one rendering does."""

    def __init__(self, limits: TemplateLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._steps = 0
        self._end = clock() + limits.max_seconds

    def step(self) -> str:
        self._steps += 1
        if self._steps > self._limits.max_steps:
            raise TemplateUnusableError(
                f"the chat template takes more than {self._limits.max_steps} steps"
            )
        if self._steps % 256 == 0 and self._clock() > self._end:
            raise TemplateUnusableError(
                f"the chat template takes longer than {self._limits.max_seconds:g} s"
            )
        return ""

    def size(self, count: int) -> None:
        if count > self._limits.max_chars:
            raise TemplateUnusableError(
                f"the chat template makes more than {self._limits.max_chars} characters"
            )

    def joined(self, *parts: Any) -> str:
        texts = [str(part) for part in parts]
        self.size(sum(map(len, texts)))
        return "".join(texts)


def _raise_exception(message: Any) -> None:
    raise TemplateRefusedError(str(message))


class ChatTemplate:
    """One template, compiled. Thread-safe.

    Raises `TemplateUnusableError` for a text that is no template.
    """

    def __init__(
        self,
        source: str,
        *,
        limits: TemplateLimits = DEFAULT_TEMPLATE_LIMITS,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateUnusableError(
                f"a chat template has at most {MAX_SOURCE_CHARS} characters"
            )
        self.source = source
        self._limits = limits
        self._clock = clock
        self._now = now
        from jinja2 import TemplateError

        from deepinfer_recipe.prompts.jinja_sandbox import compiled

        try:
            self._template = compiled(source, limits.max_chars)
        except (TemplateError, RecursionError, OverflowError, MemoryError) as error:
            raise TemplateUnusableError(f"not a chat template: {error}") from None

    def _strftime_now(self, form: Any) -> str:
        return self._now().strftime(str(form)[:200])

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text it makes of these variables.

        Raises `TemplateRefusedError` where the template itself refuses a conversation, in its own
        words, and `TemplateUnusableError` where it fails or goes beyond its limits.
        """
        from jinja2 import TemplateError

        meter = _Meter(self._limits, self._clock)
        names = {
            **variables,
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
            "__step": meter.step,
            "__joined": meter.joined,
        }
        pieces: list[str] = []
        count = 0
        try:
            for piece in self._template.generate(names):
                count += len(piece)
                meter.size(count)
                pieces.append(piece)
        except (TemplateRefusedError, TemplateUnusableError):
            raise
        except TemplateError as error:
            raise TemplateUnusableError(f"the chat template fails: {error}") from None
        except Exception as error:
            # A template is a program: it can fail in every way Python code can.
            raise TemplateUnusableError(
                f"the chat template fails: {type(error).__name__}: {str(error)[:200]}"
            ) from None
        return "".join(pieces)
