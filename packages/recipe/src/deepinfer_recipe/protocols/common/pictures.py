"""Picture references in requests: what is accepted, and as what source."""

from __future__ import annotations

import base64
import binascii

from deepinfer_recipe.base.errors import ConversionError
from deepinfer_recipe.conversation.image_source import (
    DataUrlImageSource,
    ImageDetail,
    ImageSource,
    UrlImageSource,
)

FORMATS = ("webp", "png", "jpeg", "jpg", "gif")
_EXPECTED = "valid and has one of the following formats: webp, png, jpeg, and gif."


def _media_subtype(data_url: str) -> str:
    head = data_url[len("data:") :].split(",", 1)[0].split(";", 1)[0].lower()
    return head.removeprefix("image/") if head.startswith("image/") else ""


def from_reference(url: str, detail: ImageDetail | None, place: str) -> ImageSource:
    """Source of an `image_url`: http(s) or a data URL of a picture. `place` names the message."""
    lowered = url[:16].lower()
    if lowered.startswith(("http://", "https://")):
        return UrlImageSource(url, detail or "high", path=place)
    if not lowered.startswith("data:image/"):
        raise ConversionError(f"{place}: Unsupported image_url format", param=place.lstrip("."))
    if _media_subtype(url) not in FORMATS:
        raise ConversionError(
            f"{place}: You have uploaded an unsupported image. Please make sure your image is "
            + _EXPECTED,
            param=place.lstrip("."),
        )
    return DataUrlImageSource(url, detail or "high", path=place)


def from_file(file_id: str | None, file_data: str | None, place: str) -> ImageSource:
    """Source of a `file` part: the data URL of a picture."""
    param = place.lstrip(".")
    if file_id is not None:
        raise ConversionError(
            f"{place}: file_id is not supported. Pass the image as a base64 data url instead.",
            param=param,
        )
    if file_data is None:
        raise ConversionError(f"{place}: file must have a file_id or file_data", param=param)
    if not file_data[:5].lower().startswith("data:"):
        raise ConversionError(f"{place}: file_data is not a valid base64 data url", param=param)
    if _media_subtype(file_data) not in FORMATS:
        raise ConversionError(
            f"{place}: You have uploaded an unsupported file. Please make sure your file is "
            + _EXPECTED,
            param=param,
        )
    return DataUrlImageSource(file_data, "high", path=place)


def from_base64(media_type: str, data: str, place: str) -> ImageSource:
    """Source of a Messages base64 picture; the data must decode."""
    try:
        base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ConversionError(f"{place}: base64 decode error", param=place) from None
    return DataUrlImageSource(f"data:{media_type};base64,{data}", "high", path=place)


def from_url(url: str, place: str) -> ImageSource:
    """Source of a Messages URL picture."""
    if not url[:8].lower().startswith(("http://", "https://")):
        raise ConversionError(f'{place}: invalid url: "{url}"', param=place)
    return UrlImageSource(url, "high", path=place)
