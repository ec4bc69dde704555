"""One answer while it is made: text out of tokens, and where a stop text ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_engine.core.plan import Progress
from deepinfer_engine.core.types import FinishReason, TokenLogprob, Usage
from deepinfer_engine.offline.params import SamplingParams
from deepinfer_engine.offline.results import Completion

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Answer:
    """Collects the progress of one request."""

    def __init__(self, index: int, number: int, params: SamplingParams, tok: Tokenizer) -> None:
        # Here and not above: `deepinfer --help` imports this module.
        from tokenizers.decoders import DecodeStream

        self.index = index
        self.number = number
        self.params = params
        self._tokenizer = tok
        self._stream = DecodeStream(skip_special_tokens=params.skip_special_tokens)
        self._stops = params.stops
        self._held = max((len(s) for s in self._stops), default=1) - 1
        """Characters that may still turn out to be the beginning of a stop text."""
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.finish: FinishReason | None = None
        self.usage: Usage | None = None
        self.stopped_by: str | None = None
        self._text = ""
        self._given = 0
        self._given_tokens = 0
        self.fresh = False

    @property
    def over(self) -> bool:
        """Nothing more will be taken."""
        return self.finish is not None

    def take(self, progress: Progress) -> bool:
        """True when a stop text has just ended it: the engine should stop too."""
        if self.over:
            return False
        self.fresh = True
        for at, token in enumerate(progress.tokens):
            self.tokens.append(token)
            if at < len(progress.logprobs):
                self.logprobs.append(progress.logprobs[at])
            self._text += self._stream.step(self._tokenizer, token) or ""
            if self._stops and self._cut():
                self._end("stop", progress)
                return progress.finish is None
        if progress.finish is not None:
            # A sequence of bytes that no further token completed.
            whole = self._tokenizer.decode(
                self.tokens, skip_special_tokens=self.params.skip_special_tokens
            )
            if whole.startswith(self._text):
                self._text = whole
            if not self._cut():
                self._end(progress.finish, progress)
            else:
                self._end("stop", progress)
        return False

    def piece(self) -> tuple[str, tuple[int, ...], tuple[TokenLogprob, ...]]:
        """What is new since the last call, and certain."""
        end = len(self._text) if self.over else max(self._given, len(self._text) - self._held)
        text = self._text[self._given : end]
        tokens = tuple(self.tokens[self._given_tokens :])
        logprobs = tuple(self.logprobs[self._given_tokens :])
        self._given, self._given_tokens, self.fresh = end, len(self.tokens), False
        return text, tokens, logprobs

    def completion(self) -> Completion:
        assert self.finish is not None, "an answer that is not over"
        assert self.usage is not None, "an answer without counts"
        return Completion(
            text=self._text,
            token_ids=tuple(self.tokens),
            finish_reason=self.finish,
            usage=self.usage,
            logprobs=tuple(self.logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs),
            stopped_by=self.stopped_by,
        )

    def _cut(self) -> bool:
        found = [(self._text.find(s), s) for s in self._stops if s in self._text]
        if not found:
            return False
        at, self.stopped_by = min(found)
        self._text = self._text[:at]
        return True

    def _end(self, reason: FinishReason, progress: Progress) -> None:
        usage = progress.seq.usage()
        self.finish = reason
        self.prompt_logprobs = progress.seq.prompt_logprobs
        self.usage = Usage(
            usage.prompt_tokens,
            len(self.tokens),
            usage.cached_tokens,
            usage.drafted_tokens,
            usage.accepted_tokens,
        )
