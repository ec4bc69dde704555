"""Where the pictures of a conversation come from."""

from __future__ import annotations

from typing import Literal, TypeAlias

from deepinfer_recipe.base.values import Value, require_str

ImageDetail: TypeAlias = Literal["low", "high", "original", "auto"]
ImageSourceKind: TypeAlias = Literal["data_url", "url", "bytes"]


class ImageSource(Value):
    """Base class of the image sources supplied with a conversation.

    Every source records a `path`: the request location of the image as error messages report
    it, such as `messages.0.content[1]`. Conversion fills it; a source constructed directly has
    an empty path unless the `path` keyword supplies one.
    """

    __slots__ = ("_content", "_detail", "_path")
    _kind: ImageSourceKind

    def __init__(self, content: str | bytes, detail: ImageDetail, path: str) -> None:
        if detail not in ("low", "high", "original", "auto"):
            raise ValueError(
                f'invalid detail "{detail}"; expected "low", "high", "original", or "auto"'
            )
        self._content = content
        self._detail: ImageDetail = detail
        self._path = path

    @property
    def kind(self) -> ImageSourceKind:
        """Which of `data_url`, `url` and `data` is set."""
        return self._kind

    @property
    def detail(self) -> ImageDetail:
        """Requested resolution."""
        return self._detail

    @property
    def data_url(self) -> str | None:
        """The data URL of a data URL source, else None."""
        return None

    @property
    def url(self) -> str | None:
        """The URL of an external source, else None."""
        return None

    @property
    def data(self) -> bytes | None:
        """The encoded bytes of a bytes source, else None."""
        return None

    @property
    def path(self) -> str:
        """Request location of the image; empty when the source has none."""
        return self._path

    def __repr__(self) -> str:
        return f"{type(self).__name__}(detail={self._detail!r}, path={self._path!r})"


class DataUrlImageSource(ImageSource):
    """An image referenced by a data URL with a base64 or percent-encoded body."""

    __slots__ = ()
    _kind = "data_url"

    def __init__(self, data_url: str, detail: ImageDetail = "high", *, path: str = "") -> None:
        require_str("data_url", data_url)
        super().__init__(data_url, detail, path)

    @property
    def data_url(self) -> str:
        return str(self._content)


class UrlImageSource(ImageSource):
    """An image referenced by an external URL."""

    __slots__ = ()
    _kind = "url"

    def __init__(self, url: str, detail: ImageDetail = "high", *, path: str = "") -> None:
        require_str("url", url)
        super().__init__(url, detail, path)

    @property
    def url(self) -> str:
        return str(self._content)


class BytesImageSource(ImageSource):
    """An image supplied as encoded bytes."""

    __slots__ = ()
    _kind = "bytes"

    def __init__(self, data: bytes, detail: ImageDetail = "high", *, path: str = "") -> None:
        super().__init__(bytes(data), detail, path)

    @property
    def data(self) -> bytes:
        return self._content  # type: ignore[return-value]
