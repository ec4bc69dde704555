"""From picture sources to prepared pictures, within the limits of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from deepinfer_recipe.base.errors import ImageError
from deepinfer_recipe.conversation.image_source import ImageSource
from deepinfer_recipe.images.data_url import read_data_url
from deepinfer_recipe.images.preprocess import source_pixels
from deepinfer_recipe.images.source import (
    LOW_DETAIL_MAX_DIMENSION_PX,
    MAX_DIMENSION_PX,
    MAX_IMAGE_BYTES,
    ImageInfo,
    ImageQuota,
    MultiModalData,
    PreprocessOptions,
)


class Fetcher(Protocol):
    """Downloads a picture."""

    def fetch(self, url: str) -> bytes:
        """The bytes behind a URL."""
        ...


class Preprocessor(Protocol):
    """Prepares a picture."""

    def preprocess(self, data: bytes, options: PreprocessOptions) -> ImageInfo:
        """The prepared picture."""
        ...


class ImageResolver:
    """An image resolver built from explicit fetching and preprocessing components."""

    __slots__ = ("_fetcher", "_preprocessor")

    def __init__(self, fetcher: Fetcher, preprocessor: Preprocessor) -> None:
        self._fetcher = fetcher
        self._preprocessor = preprocessor

    def resolve(self, sources: Sequence[ImageSource], quota: ImageQuota) -> MultiModalData:
        """Resolve image sources and update the supplied quota.

        A failed call leaves the quota unchanged. Errors name the picture's place in the
        request when its source knows it.

        Raises ImageError for a picture that cannot be had.
        """
        quota.check_count(len(sources))
        images: list[ImageInfo] = []
        total = pixels = 0
        for source in sources:
            try:
                data = self._bytes(source)
                total += len(data)
                quota.check_bytes(total)
                pixels += source_pixels(data)
                quota.check_pixels(pixels)
                options = PreprocessOptions(
                    source.detail, MAX_DIMENSION_PX, LOW_DETAIL_MAX_DIMENSION_PX
                )
                images.append(self._preprocessor.preprocess(data, options))
            except ImageError as error:
                if not source.path:
                    raise
                raise ImageError(
                    error.kind, f"{source.path}: {error}", is_retryable=error.is_retryable
                ) from None
        quota.record(len(sources), total, pixels)
        return MultiModalData(images)

    def _bytes(self, source: ImageSource) -> bytes:
        if source.url is not None:
            data = self._fetcher.fetch(source.url)
        elif source.data_url is not None:
            data = read_data_url(source.data_url)
        else:
            data = source.data or b""
        if len(data) > MAX_IMAGE_BYTES:
            raise ImageError(
                "ImageTooLarge",
                f"an image may have {MAX_IMAGE_BYTES} bytes, this one has {len(data)}",
            )
        return data
