"""Errors of the codec.

RecipeError
├── RequestParseError    (ValueError)    the body is not JSON, or a field has the wrong shape
├── ConversionError                      the body parses, but asks for something not allowed
│   └── UnknownModelError                ... for a model name that is not in the table
├── RequestConsumedError (RuntimeError)  a request object was converted a second time
├── TemplateRefusedError                 a chat template refuses this conversation
├── TemplateUnusableError (ValueError)   a chat template is broken, or goes beyond its limits
├── EncodeError          (RuntimeError)  the prompt cannot be turned into token ids
├── StreamError          (RuntimeError)  chunks pushed in a wrong order, or not decodable
├── SealError            (ValueError)    a sealed text was changed or is somebody else's
├── StoreError           (RuntimeError)  a store of responses cannot be read or written
├── MissingExtraError    (ImportError)   a feature needs an optional dependency
├── ImageError                           a picture cannot be fetched, read or prepared
├── GrammarError         (ValueError)    an output constraint cannot be enforced as it stands
│   └── GrammarTooComplex                ... or not within the limits of size, time and memory
├── GrammarUnavailable   (ImportError)   enforcing needs a library that is not installed
├── GrammarBusy                          too many grammars are being compiled
└── CalcResizeError      (ValueError)    the picture size calculation did not converge

The first two and `GrammarError` are the client's fault and map to HTTP (`error_response`); the
three after those two are misuse by the calling program;
`ImageError.is_retryable` tells network trouble from a picture that will never work.
"""

from __future__ import annotations

import json
from typing import Any


class RecipeError(Exception):
    """Root of this package's errors."""


class RequestParseError(RecipeError, ValueError):
    """The request body is not valid JSON or a field has the wrong type.

    `param` is the path of the field at fault (`messages[0].content`), None for broken JSON.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ConversionError(RecipeError):
    """A protocol request is invalid or cannot be converted.

    `status_code` is the HTTP status, `body` the JSON error body that the reference server
    sends: the same shape for all three protocols, with `param` null. `param` here names the
    field at fault; `wire_errors.error_response` uses it for richer bodies.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status_code: int = 400,
        code: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status_code = status_code
        self.code = code

    @property
    def body(self) -> str:
        """The reference's error body, as JSON text."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_request_error",
        }
        return json.dumps({"error": error}, ensure_ascii=False, separators=(",", ":"))


class UnknownModelError(ConversionError):
    """The request names a model that no version stands for; `model` is that name."""

    def __init__(self, message: str, model: str, *, status_code: int) -> None:
        code = "model_not_found" if status_code == 404 else "invalid_request_error"
        super().__init__(message, param="model", status_code=status_code, code=code)
        self.model = model


class RequestConsumedError(RecipeError, RuntimeError):
    """A request object may be converted once; parse the body again for a second time."""


class TemplateRefusedError(RecipeError):
    """A chat template refuses a conversation (`raise_exception`), in its own words."""


class TemplateUnusableError(RecipeError, ValueError):
    """A chat template is no template, fails, or goes beyond its limits."""


class EncodeError(RecipeError, RuntimeError):
    """A conversation cannot be encoded into token ids."""


class StreamError(RecipeError, RuntimeError):
    """A stream processor was used after its end, or a chunk cannot be decoded."""


class SealError(RecipeError, ValueError):
    """A sealed text cannot be opened: another key, another audience, or it was changed."""


class StoreError(RecipeError, RuntimeError):
    """A store of responses cannot be read or written."""


class MissingExtraError(RecipeError, ImportError):
    """A feature needs an optional dependency."""

    def __init__(self, feature: str, extra: str, distribution: str) -> None:
        super().__init__(
            f"{feature} needs {distribution}: pip install './packages/recipe[{extra}]'"
        )


class ImageError(RecipeError):
    """A failure to resolve, fetch, or preprocess images, including request limits.

    `kind` is one of UnsupportedMediaType, InvalidDataUrl, InvalidUrl, EmptyImage, Decode,
    ImageDimensionsTooLarge, ImageTooLarge, TooManyImages, TotalSizeTooLarge, Fetch,
    DestinationRejected. `is_retryable` is true only where the same request may work later.
    """

    def __init__(self, kind: str, message: str, *, is_retryable: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.is_retryable = is_retryable


class GrammarError(RecipeError, ValueError):
    """An output constraint (a schema, a tool, an expression) cannot be turned into a grammar.

    `param` names the request field it came from, where that is known.
    """

    code = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class GrammarTooComplex(GrammarError):  # noqa: N818 - reads as the condition it reports
    """A grammar passes a limit: size of its text, time or memory to compile it."""

    code = "schema_too_complex"


class GrammarUnavailable(RecipeError, ImportError):  # noqa: N818
    """Enforcing constraints needs xgrammar: `pip install "./packages/recipe[grammar]"`."""


class GrammarBusy(RecipeError):  # noqa: N818
    """Too many grammars are being compiled, or the compiler is closed; try again later."""


class CalcResizeError(RecipeError, ValueError):
    """The image token calculation did not converge."""
