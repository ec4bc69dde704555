"""Reading data URLs of pictures."""

from __future__ import annotations

import base64
import binascii
from urllib.parse import unquote_to_bytes

from deepinfer_recipe.base.errors import ImageError

MEDIA_TYPES = ("image/webp", "image/png", "image/jpeg", "image/jpg", "image/gif")


def read_data_url(url: str) -> bytes:
    """The bytes of a picture's data URL, base64 or percent-encoded.

    Raises `ImageError` (InvalidDataUrl, UnsupportedMediaType).
    """
    head, comma, body = url.partition(",")
    if not comma or head[:5].lower() != "data:":
        raise ImageError("InvalidDataUrl", "a data URL is `data:` type `,` body")
    media_type, *parameters = head[5:].split(";")
    if media_type.strip().lower() not in MEDIA_TYPES:
        raise ImageError(
            "UnsupportedMediaType",
            f"expected one of {', '.join(MEDIA_TYPES)}, got {media_type[:60]!r}",
        )
    if not any(parameter.strip().lower() == "base64" for parameter in parameters):
        return unquote_to_bytes(body)
    try:
        return base64.b64decode(unquote_to_bytes(body), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError("InvalidDataUrl", f"the body is not base64: {error}") from None
