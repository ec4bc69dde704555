"""Prepared pictures and the limits of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_recipe.base.errors import ImageError
from deepinfer_recipe.conversation.image_source import ImageDetail
from deepinfer_recipe.images.size import image_tokens

MAX_IMAGES = 600
MAX_IMAGE_BYTES = 32 * 2**20
MAX_TOTAL_BYTES = 64 * 2**20
MAX_TOTAL_PIXELS = 4 * 8192 * 8192
"""Of the pictures of a request before they are resized: what decoding may cost."""
MAX_DIMENSION_PX = 8192
LOW_DETAIL_MAX_DIMENSION_PX = 544


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """A preprocessed image for the inference backend: its bytes and its size in pixels."""

    data: bytes
    width: int
    height: int


class MultiModalData:
    """Images in the order their placeholders appear in a prompt."""

    __slots__ = ("_images",)

    def __init__(self, images: Sequence[ImageInfo] | None = None) -> None:
        self._images = tuple(images or ())

    @property
    def images(self) -> list[ImageInfo]:
        """The prepared pictures."""
        return list(self._images)

    def is_empty(self) -> bool:
        """Whether there are no pictures."""
        return not self._images

    def image_token_adjustment(self) -> int:
        """Return the number of inference input tokens beyond one per placeholder.

        Each picture takes `image_tokens(width, height)` tokens and one placeholder. Raises
        `CalcResizeError` when fitting an image does not converge.
        """
        return sum(image_tokens(image.width, image.height) - 1 for image in self._images)


class ImageQuota:
    """The image count and encoded bytes recorded by the completed resolve calls of a request.

    To apply the limits across the resolve calls of a request, pass the same quota to every
    call. A call records its sources after it preprocesses every one of them, so a failed call
    adds nothing.
    """

    __slots__ = ("_bytes", "_count", "_pixels")

    def __init__(self) -> None:
        self._count = 0
        self._bytes = 0
        self._pixels = 0

    def image_count(self) -> int:
        """Pictures so far."""
        return self._count

    def byte_size(self) -> int:
        """Encoded bytes of the pictures so far."""
        return self._bytes

    def check_count(self, images: int) -> None:
        """Raise `ImageError` if so many more pictures are too many."""
        total = self._count + images
        if total > MAX_IMAGES:
            raise ImageError(
                "TooManyImages", f"a request may hold {MAX_IMAGES} images, this one has {total}"
            )

    def check_bytes(self, more: int) -> None:
        """Raise `ImageError` if so many more bytes are too many."""
        total = self._bytes + more
        if total > MAX_TOTAL_BYTES:
            raise ImageError(
                "TotalSizeTooLarge",
                f"the images of a request may hold {MAX_TOTAL_BYTES} bytes together, "
                f"these have {total}",
            )

    def check_pixels(self, more: int) -> None:
        """Raise `ImageError` if so many more pixels to decode are too many."""
        total = self._pixels + more
        if total > MAX_TOTAL_PIXELS:
            raise ImageError(
                "TotalSizeTooLarge",
                f"the images of a request may have {MAX_TOTAL_PIXELS} pixels together, "
                f"these have {total}; send smaller ones",
            )

    def record(self, images: int, more: int, pixels: int = 0) -> None:
        """Count pictures that were prepared."""
        self._pixels += pixels
        self._count += images
        self._bytes += more


@dataclass(frozen=True, slots=True)
class PreprocessOptions:
    """Options of one image preprocessing operation.

    max_dimension_px: a picture with a longer side is an error.
    low_detail_max_dimension_px: the longer side that a `low` detail picture is reduced to.
    """

    detail: ImageDetail
    max_dimension_px: int
    low_detail_max_dimension_px: int
