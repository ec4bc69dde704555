"""Zip containers of office documents and books, opened within limits and read part by part."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

from lxml import etree  # pyright: ignore[reportAttributeAccessIssue]

from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.errors import ContentError, LimitError

MAX_TREE_BYTES = 16 * 1024 * 1024
_MIMETYPES = {
    "application/epub+zip": "epub",
    "application/vnd.oasis.opendocument.text": "odt",
    "application/vnd.oasis.opendocument.presentation": "odp",
    "application/vnd.oasis.opendocument.spreadsheet": "ods",
}
_MAIN_PARTS = {
    "word/document.xml": "docx",
    "ppt/presentation.xml": "pptx",
    "xl/workbook.xml": "xlsx",
}


def package_kind(body: bytes) -> str | None:
    """docx, pptx, xlsx, odt, odp, ods, epub; None for any other zip file."""
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            names = archive.NameToInfo
            info = names.get("mimetype")
            if info is not None and info.file_size < 200:
                kind = _MIMETYPES.get(archive.read(info).decode("ascii", "replace").strip())
                if kind is not None:
                    return kind
            return next((kind for part, kind in _MAIN_PARTS.items() if part in names), None)
    except (zipfile.BadZipFile, zlib.error, OSError, ValueError, NotImplementedError, RuntimeError):
        return None


class Package:
    """A container whose table of contents has been checked; archives inside it stay closed.

    Raises LimitError(decompression_bomb) for too many or too large entries, ContentError for a
    damaged or locked container and for names that point outside of it.
    """

    def __init__(self, body: bytes, limits: Limits) -> None:
        try:
            self._archive = zipfile.ZipFile(io.BytesIO(body))
        except (zipfile.BadZipFile, OSError, ValueError) as error:
            raise _damaged(str(error)) from None
        entries = self._archive.infolist()
        total = sum(e.file_size for e in entries)
        grace, ratio = limits.ratio_grace_bytes, limits.decompression_ratio
        if len(entries) > limits.document_entries:
            raise _bomb(f"{len(entries)} entries, at most {limits.document_entries} are opened")
        if total > limits.document_total_bytes or total > max(grace, ratio * len(body)):
            raise _bomb(f"{total} bytes when unpacked, from {len(body)}")
        for entry in entries:
            name = entry.filename
            if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
                raise ContentError(
                    "unsupported_content_type", "the document holds a path that leads outside it"
                )
            if entry.file_size > max(grace, ratio * max(entry.compress_size, 1)):
                raise _bomb(f"{name!r} unpacks to {entry.file_size} bytes")

    def __contains__(self, name: str) -> bool:
        return name in self._archive.NameToInfo

    def read(self, name: str, limit: int) -> bytes:
        """The bytes of one part, b"" if it is missing; never more than the table promises."""
        info = self._archive.NameToInfo.get(name)
        if info is None:
            return b""
        if info.file_size > limit:
            raise LimitError(
                "response_too_large", f"{name!r} has {info.file_size} bytes, at most {limit}"
            )
        try:
            return self._archive.read(info)
        except (
            zipfile.BadZipFile,
            zlib.error,
            EOFError,
            OSError,
            NotImplementedError,
            RuntimeError,  # encrypted
        ) as error:
            raise _damaged(str(error)) from None

    def tree(self, name: str) -> Any | None:
        """The root element of an XML part, None if it is missing or not XML."""
        data = self.read(name, MAX_TREE_BYTES)
        parser = etree.XMLParser(
            resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False
        )
        try:
            root = etree.fromstring(data, parser) if data else None
        except (etree.XMLSyntaxError, ValueError):
            return None
        if root is not None:
            _refuse_dtd(root)
        return root

    def stream(self, name: str, tags: tuple[str, ...], limit: int) -> Iterator[Any]:
        """Elements of those tags as they end, in document order; each is emptied afterwards."""
        data = self.read(name, limit)
        if not data:
            return
        events = etree.iterparse(
            io.BytesIO(data),
            tag=tags,
            resolve_entities=False,
            no_network=True,
            load_dtd=False,
            huge_tree=False,
        )
        try:
            for _, element in events:
                _refuse_dtd(element)
                outer = next((a for a in element.iterancestors() if a.tag in tags), None)
                if outer is None:
                    yield element
                    element.clear()
                    while (before := element.getprevious()) is not None:
                        del element.getparent()[0]
                        del before
        except etree.XMLSyntaxError as error:
            raise _damaged(f"{name}: {error}") from None

    def opf_names(self) -> list[str]:
        """The package documents a book's container.xml names, [] for other documents."""
        root = self.tree("META-INF/container.xml")
        found = root.iter() if root is not None else ()
        return [e.get("full-path", "") for e in found if local(e) == "rootfile"]

    def relations(self, part: str) -> dict[str, tuple[str, bool]]:
        """Relation id -> (target, whether it is outside). Nothing outside is ever requested."""
        folder, _, name = part.rpartition("/")
        root = self.tree(f"{folder}/_rels/{name}.rels" if folder else f"_rels/{name}.rels")
        found: dict[str, tuple[str, bool]] = {}
        for relation in root if root is not None else ():
            target = relation.get("Target", "")
            external = relation.get("TargetMode") == "External"
            found[relation.get("Id", "")] = (
                target if external else resolve(folder, target),
                external,
            )
        return found


def resolve(folder: str, target: str) -> str:
    """A part name relative to `folder`; a leading slash means the container's root."""
    parts = [] if target.startswith("/") else [p for p in folder.split("/") if p]
    for piece in target.split("/"):
        if piece == "..":
            parts = parts[:-1]
        elif piece not in ("", "."):
            parts.append(piece)
    return "/".join(parts)


def local(element: Any) -> str:
    """The tag without its namespace, "" for comments and the like."""
    return etree.QName(element).localname if isinstance(element.tag, str) else ""


def attribute(element: Any, name: str) -> str | None:
    """An attribute by its local name, whatever its namespace."""
    value = element.get(name)
    if value is not None:
        return str(value)
    return next((str(v) for k, v in element.attrib.items() if k.endswith("}" + name)), None)


def _refuse_dtd(element: Any) -> None:
    if element.getroottree().docinfo.internalDTD is not None:
        raise ContentError(
            "unsupported_content_type", "the document declares a DTD, which none may"
        )


def _bomb(message: str) -> LimitError:
    return LimitError("decompression_bomb", f"the document is too large: {message}")


def _damaged(message: str) -> ContentError:
    return ContentError("unsupported_content_type", f"the document is damaged: {message[:200]}")
