"""Preparing a picture for the model: decode, orient, fit, encode. Needs Pillow."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any, Literal

from deepinfer_recipe.base.errors import ImageError
from deepinfer_recipe.images.size import RELEASED, ImageSizeRule, limited_size
from deepinfer_recipe.images.source import ImageInfo, PreprocessOptions

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = ("WEBP", "PNG", "JPEG", "GIF")
_SIGNATURES = (b"RIFF", b"\x89PNG", b"\xff\xd8", b"GIF8")
_WEBP_QUALITY = 90


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ImageError(
            "Decode", "preparing pictures needs Pillow: pip install './packages/recipe[images]'"
        ) from None
    return Image


def source_pixels(data: bytes) -> int:
    """Pixels of a picture by its header, nothing decoded; 0 where that cannot be told."""
    try:
        from PIL import Image
    except ImportError:
        return 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                return image.width * image.height
    except Exception:
        # Damaged files make the decoders raise all kinds; decoding will say what is wrong.
        return 0


class ImagePreprocessor:
    """Decodes WebP, PNG, JPEG or GIF (first frame) and makes an RGB picture of the fitted size.

    Transparency is laid on white. applies_orientation: turn the picture as its EXIF data say;
    the reference does not. output: a lossy WebP, or the pixels themselves, one byte a channel,
    row by row. size_rule: how the model fits pictures.
    """

    __slots__ = ("_applies_orientation", "_output", "_size_rule")

    def __init__(
        self,
        *,
        applies_orientation: bool = True,
        output: Literal["webp", "rgb"] = "webp",
        size_rule: ImageSizeRule = RELEASED,
    ) -> None:
        if output not in ("webp", "rgb"):
            raise ValueError(f'output is "webp" or "rgb", got {output!r}')
        self._applies_orientation = applies_orientation
        self._output = output
        self._size_rule = size_rule

    def preprocess(self, data: bytes, options: PreprocessOptions) -> ImageInfo:
        """Prepare one picture. Raises `ImageError` for what is not a usable picture."""
        if not data:
            raise ImageError("EmptyImage", "the image has no bytes")
        pillow = _pillow()
        from PIL import UnidentifiedImageError

        try:
            with warnings.catch_warnings():
                # The size is checked here; Pillow's own warning must not reach the caller.
                warnings.simplefilter("ignore", pillow.DecompressionBombWarning)
                with pillow.open(io.BytesIO(data), formats=_FORMATS) as image:
                    self._check_size(image, options)
                    return self._fit(image, options)
        except UnidentifiedImageError:
            if data.startswith(_SIGNATURES):
                raise ImageError("Decode", "the image is cut short or damaged") from None
            raise ImageError(
                "UnsupportedMediaType", "the image is not a WebP, PNG, JPEG or GIF picture"
            ) from None
        except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
            raise ImageError("Decode", f"the image cannot be decoded: {error}") from None

    def _check_size(self, image: Image, options: PreprocessOptions) -> None:
        if max(image.size) > options.max_dimension_px:
            raise ImageError(
                "ImageDimensionsTooLarge",
                f"a side may have {options.max_dimension_px} pixels, "
                f"this image is {image.width} x {image.height}",
            )

    def _fit(self, image: Image, options: PreprocessOptions) -> ImageInfo:
        picture = image
        if self._applies_orientation:
            from PIL import ImageOps

            # In place: a copy of the largest picture takes 200 MB.
            ImageOps.exif_transpose(image, in_place=True)
        width, height = picture.size
        if options.detail == "low":
            width, height = limited_size(width, height, options.low_detail_max_dimension_px)
        width, height = self._size_rule.fitted_size(width, height)
        resized = _resized(picture, (width, height))
        if self._output == "rgb":
            return ImageInfo(resized.tobytes(), width, height)
        out = io.BytesIO()
        resized.save(out, "WEBP", quality=_WEBP_QUALITY)
        return ImageInfo(out.getvalue(), width, height)


def _resized(picture: Image, size: tuple[int, int]) -> Image:
    """RGB; transparency is laid on white after resizing, when there are fewer pixels."""
    pillow = _pillow()
    if not picture.has_transparency_data:
        return _in_mode(picture, "RGB").resize(size, pillow.Resampling.BICUBIC)
    with_alpha = _in_mode(picture, "RGBA").resize(size, pillow.Resampling.BICUBIC)
    white = pillow.new("RGBA", size, "white")
    return pillow.alpha_composite(white, with_alpha).convert("RGB")


def _in_mode(picture: Image, mode: Literal["RGB", "RGBA"]) -> Image:
    """The picture in this mode; itself, and no copy, if it is."""
    return picture if picture.mode == mode else picture.convert(mode)


OpenCvImagePreprocessor = ImagePreprocessor
"""The reference's name of the preprocessor."""
