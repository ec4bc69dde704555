"""Errors of the engine.

EngineError
├── ConfigError          a setting, flag or file the operator gave is unusable
├── CheckpointError      a model directory is missing, incomplete or corrupt
├── RequestError         this request cannot be served             (caller's fault)
│   ├── PromptTooLong    prompt + 1 token does not fit the model's length
│   ├── UnknownModel     the request names a model this server does not serve
│   ├── CapacityError    the request can never fit this engine's pools
│   ├── ConstraintError  its schema or expression cannot be enforced
│   │   └── SchemaTooComplex  ... within the limits of time, memory and size
│   └── ConstraintsUnavailable  this engine lacks what enforcing needs
├── EngineUnavailable    no worker can take the request now        (HTTP 503 / 529)
├── EngineLost           the worker died while the request ran     (stream error event)
└── TransferError        a prefill -> decode transfer broke its protocol
"""

from __future__ import annotations


class EngineError(Exception):
    """Root of this package's errors; the message says what was wanted, what was got, what to do."""


class ConfigError(EngineError):
    """A setting, flag or file given by the operator is unusable."""


class CheckpointError(EngineError):
    """A model directory is missing, incomplete or corrupt; the message names file or tensor."""


class RequestError(EngineError):
    """This request cannot be served, and sending it again will not help.

    `param` names the field of the request at fault, where one is known.
    """

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):  # noqa: N818 - reads as the condition it reports
    """The prompt leaves no room for one generated token."""

    def __init__(self, prompt_tokens: int, max_tokens: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens, and this model takes at most {max_tokens} "
            f"tokens of prompt; shorten the conversation by {prompt_tokens - max_tokens}"
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens


class UnknownModel(RequestError):  # noqa: N818
    """The request names a model that this server does not serve."""

    def __init__(self, model: str, served: tuple[str, ...]) -> None:
        super().__init__(f"unknown model {model!r}; this server serves: {', '.join(served)}")
        self.model = model
        self.served = served


class CapacityError(RequestError):
    """The request could not fit even an empty engine."""


class ConstraintError(RequestError):
    """A schema, expression or tool cannot be turned into a grammar; `param` names the field."""


class SchemaTooComplex(ConstraintError):  # noqa: N818
    """A constraint passes a limit: size of its text, time or memory to compile it."""


class ConstraintsUnavailable(RequestError):  # noqa: N818
    """This engine has no grammar compiler: xgrammar is not installed, or the backend has no
    tokenizer."""


class EngineUnavailable(EngineError):  # noqa: N818
    """No worker can take the request now."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineLost(EngineError):  # noqa: N818
    """The worker that ran the request died or was cut off."""


class TransferError(EngineError):
    """A prefill -> decode transfer broke its protocol (digest, coverage, epoch or layout)."""
