"""Pictures of requests to pixels of the model's size, with `deepinfer_recipe`."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfer_engine.adapters.recipe import (
    BytesImageSource,
    ImageError,
    ImageFetcher,
    ImageInfo,
    ImagePreprocessor,
    ImageQuota,
    ImageResolver,
    ImageSizeRule,
    ImageSource,
    PreprocessOptions,
    RecipeError,
)
from deepinfer_engine.codec.errors import InvalidRequest
from deepinfer_engine.core.pictures import PictureRules
from deepinfer_engine.errors import RequestError
from deepinfer_engine.model.registry import load_family_config

FETCH_S = 30.0
"""For all URLs of one request together."""
_DECODERS = threading.BoundedSemaphore(2)
"""A picture of the largest allowed size takes several hundred MB while it is decoded."""

Image = tuple[int, int, bytes]
"""(width, height, RGB pixels)."""


@dataclass(frozen=True, slots=True)
class PicturePolicy:
    """What requests may ask for. Without `fetches_urls` pictures come as data URLs alone."""

    max_images: int = 16
    fetches_urls: bool = False


class PictureIntake:
    """Makes pictures ready for one model. Thread-safe; calls block."""

    def __init__(self, rules: PictureRules, policy: PicturePolicy) -> None:
        self.rules = rules
        self._policy = policy
        self._preprocessor = _Preprocessor(
            ImageSizeRule(
                rules.patch,
                rules.cell,
                rules.min_pixels,
                rules.max_tokens,
                rules.max_wh_ratio,
            )
        )

    @classmethod
    def of_directory(cls, model_dir: Path, policy: PicturePolicy) -> PictureIntake | None:
        """For a checkpoint directory; None when its model has no tower, or no config is there."""
        if not (model_dir / "config.json").exists():
            return None
        rules = load_family_config(model_dir)[1].picture_rules
        return None if rules is None else cls(rules, policy)

    def of_request(self, sources: Sequence[ImageSource]) -> list[Image]:
        """In the order of the sources. Raises InvalidRequest naming the picture's place."""
        most = self._policy.max_images
        if len(sources) > most:
            raise InvalidRequest(
                f"a request may hold {most} pictures on this server, this one has {len(sources)}",
                param=param_of(sources[most]),
            )
        fetcher = _Fetcher(FETCH_S) if self._policy.fetches_urls else _NoFetcher()
        resolver, quota = ImageResolver(fetcher, self._preprocessor), ImageQuota()
        images: list[Image] = []
        for source in sources:
            try:
                images += _images(resolver.resolve([source], quota).images)
            except RecipeError as error:
                message = str(error).lstrip(".")
                raise InvalidRequest(message, param=param_of(source)) from error
        return images

    def of_bytes(self, encoded: Sequence[bytes]) -> list[Image]:
        """Encoded pictures (WebP, PNG, JPEG or GIF) of a caller in this process.

        Raises RequestError naming the picture by its index.
        """
        resolver, quota = ImageResolver(_NoFetcher(), self._preprocessor), ImageQuota()
        images: list[Image] = []
        for i, data in enumerate(encoded):
            try:
                images += _images(resolver.resolve([BytesImageSource(data)], quota).images)
            except RecipeError as error:
                raise RequestError(f"picture {i}: {error}") from error
        return images


def param_of(source: ImageSource) -> str:
    """The field of the request that holds a picture."""
    return source.path.lstrip(".") or "messages"


def _images(prepared: Sequence[ImageInfo]) -> list[Image]:
    return [(one.width, one.height, one.data) for one in prepared]


class _Preprocessor:
    """Decodes few pictures at a time, whatever number of requests brings them."""

    def __init__(self, rule: ImageSizeRule) -> None:
        self._inner = ImagePreprocessor(output="rgb", size_rule=rule)

    def preprocess(self, data: bytes, options: PreprocessOptions) -> ImageInfo:
        with _DECODERS:
            return self._inner.preprocess(data, options)


class _Fetcher:
    """Public addresses only (the default rule of `ImageFetcher`), within one deadline."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def fetch(self, url: str) -> bytes:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise ImageError("Fetch", f"the pictures took over {FETCH_S} s", is_retryable=True)
        return ImageFetcher(timeout_s=left).fetch(url)


class _NoFetcher:
    def fetch(self, url: str) -> bytes:
        raise ImageError(
            "DestinationRejected",
            "this server does not fetch pictures by URL; send the picture as a data URL",
        )
