"""Documents that were made lately, by the content they were made of and how."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from dataclasses import asdict

from deepinfer_search_fetch.extract import ENGINE_VERSION
from deepinfer_search_fetch.extract.document import Document, Job

_ROW_BYTES = 200  # of lists of links and of places to cut, roughly
_BASE_BYTES = 2000


class DocumentCache:
    """The most recently used documents, within `max_bytes` of memory.

    Many pages of one document, and many clients of one page, cost one extraction.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[str, Document] = OrderedDict()

    @staticmethod
    def key(body_digest: str, job: Job) -> str:
        text = json.dumps([ENGINE_VERSION, body_digest, asdict(job)], sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def get(self, key: str) -> Document | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def put(self, key: str, document: Document) -> None:
        """Keep a document, and drop the oldest beyond the limit; a huge one is not kept."""
        size = _size(document)
        if size > self._max_bytes // 4 or key in self._kept:
            return
        self._kept[key] = document
        self._bytes += size
        while self._bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= _size(oldest)


def _size(document: Document) -> int:
    rows = len(document.extraction.links) + len(document.pages.chars)
    return 4 * len(document.content) + _ROW_BYTES * rows + _BASE_BYTES
