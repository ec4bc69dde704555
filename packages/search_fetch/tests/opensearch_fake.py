"""A hand-written stand-in for an OpenSearch node, from its public REST documentation.

It knows the few calls and query clauses that the adapter sends, with Lucene's BM25 over fields that
are split at blanks. It is no OpenSearch: what it accepts, a real node may still refuse.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from deepinfer_search_fetch.search.corrections import edit_distance

K1, B = 1.2, 0.75
Source = dict[str, Any]


class FakeIndex:
    def __init__(self, body: Source) -> None:
        self.mappings: Source = body["mappings"]
        self.pending: dict[str, Source | None] = {}
        self.documents: dict[str, Source] = {}

    def refresh(self) -> None:
        for doc_id, source in self.pending.items():
            if source is None:
                self.documents.pop(doc_id, None)
            else:
                self.documents[doc_id] = source
        self.pending = {}

    def terms(self, doc: Source, field: str) -> list[str]:
        return str(doc.get(field, "")).split()

    def bm25(self, doc: Source, field: str, tf: int, words: list[str]) -> float:
        """Several words are a phrase: their idf is summed, tf counts the phrase."""
        lengths = [len(self.terms(d, field)) for d in self.documents.values() if d.get(field)]
        idf = 0.0
        for word in words:
            df = sum(word in self.terms(d, field) for d in self.documents.values())
            idf += math.log(1 + (len(lengths) - df + 0.5) / (df + 0.5))
        relative = len(self.terms(doc, field)) * len(lengths) / sum(lengths)
        return idf * tf / (tf + K1 * (1 - B + B * relative))

    def score(self, query: Source, doc: Source) -> float | None:
        """None if the clause does not match."""
        [(kind, body)] = query.items()
        return getattr(self, f"_{kind}")(body, doc)

    def _match_all(self, body: Source, doc: Source) -> float:
        return 1.0

    def _bool(self, body: Source, doc: Source) -> float | None:
        if any(self.score(q, doc) is not None for q in body.get("must_not", [])):
            return None
        if any(self.score(q, doc) is None for q in body.get("filter", [])):
            return None
        must = [self.score(q, doc) for q in body.get("must", [])]
        should = [s for q in body.get("should", []) if (s := self.score(q, doc)) is not None]
        if None in must or len(should) < body.get("minimum_should_match", 0):
            return None
        return sum(s for s in must if s is not None) + sum(should)

    def _dis_max(self, body: Source, doc: Source) -> float | None:
        found = [s for q in body["queries"] if (s := self.score(q, doc)) is not None]
        if not found:
            return None
        return max(found) + body["tie_breaker"] * (sum(found) - max(found))

    def _term(self, body: Source, doc: Source) -> float | None:
        [(field, wanted)] = body.items()
        value = wanted["value"] if isinstance(wanted, dict) else wanted
        if self.mappings["properties"][field]["type"] == "keyword":
            held = doc.get(field, [])
            return 1.0 if value in (held if isinstance(held, list) else [held]) else None
        tf = self.terms(doc, field).count(value)
        boost = wanted.get("boost", 1.0) if isinstance(wanted, dict) else 1.0
        return boost * self.bm25(doc, field, tf, [value]) if tf else None

    def _terms(self, body: Source, doc: Source) -> float | None:
        [(field, values)] = body.items()
        return 1.0 if set(values) & set(doc.get(field, [])) else None

    def _range(self, body: Source, doc: Source) -> float | None:
        [(field, bounds)] = body.items()
        value = doc.get(field)
        inside = value is not None and bounds.get("gte", value) <= value <= bounds.get("lte", value)
        return 1.0 if inside else None

    def _fuzzy(self, body: Source, doc: Source) -> float | None:
        [(field, wanted)] = body.items()
        near = (edit_distance(wanted["value"], t) for t in self.terms(doc, field))
        return 1.0 if any(d <= wanted["fuzziness"] for d in near) else None

    def _match_phrase(self, body: Source, doc: Source) -> float | None:
        [(field, wanted)] = body.items()
        words, held = wanted["query"].split(), self.terms(doc, field)
        n = sum(held[i : i + len(words)] == words for i in range(len(held)))
        return self.bm25(doc, field, n, words) if n else None


class FakeOpenSearch:
    """Listens on loopback; `fail` answers every request with that status."""

    def __init__(self) -> None:
        self.indices: dict[str, FakeIndex] = {}
        self.requests: Counter[str] = Counter()
        self.fail: int | None = None
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def _handle(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                status, answer = fake.answer(self.command, self.path, self.rfile.read(length))
                body = b"" if self.command == "HEAD" else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_HEAD = _handle  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        name, _, rest = path.strip("/").partition("?")[0].partition("/")
        self.requests[f"{method} {rest or 'index'}"] += 1
        if self.fail is not None:
            return self.fail, {"error": {"type": "scripted"}, "status": self.fail}
        if not rest:
            if method == "PUT":
                self.indices[name] = FakeIndex(json.loads(body))
                return 200, {"acknowledged": True}
            return (200 if name in self.indices else 404), {}
        index = self.indices[name]
        if rest.startswith("_mapping"):
            if method == "PUT":
                index.mappings.update(json.loads(body))
            return 200, {name: {"mappings": index.mappings}}
        if rest == "_bulk":
            return 200, self.bulk(index, body)
        if rest == "_refresh":
            index.refresh()
            return 200, {}
        if rest == "_count":
            return 200, {"count": len(index.documents)}
        if rest.startswith("_doc/"):
            found = index.documents.get(rest.removeprefix("_doc/"))
            return (200, {"found": True, "_source": found}) if found else (404, {"found": False})
        return 200, self.search(index, json.loads(body))

    def bulk(self, index: FakeIndex, body: bytes) -> Source:
        lines = iter(body.decode().splitlines())
        items = []
        for line in lines:
            [(kind, target)] = json.loads(line).items()
            index.pending[target["_id"]] = json.loads(next(lines)) if kind == "index" else None
            items.append({kind: {"_id": target["_id"], "status": 200}})
        return {"errors": False, "items": items}

    def search(self, index: FakeIndex, body: Source) -> Source:
        if "aggs" in body:
            filters = body["aggs"]["terms"]["filters"]["filters"]
            counts = {
                key: {
                    "doc_count": sum(
                        index.score(q, d) is not None for d in index.documents.values()
                    )
                }
                for key, q in filters.items()
            }
            return {"aggregations": {"terms": {"buckets": counts}}, "hits": {"hits": []}}
        scored = [
            (score, doc_id, doc)
            for doc_id, doc in index.documents.items()
            if (score := index.score(body["query"], doc)) is not None
        ]
        scored.sort(key=lambda item: -item[0])
        hits = [
            {"_id": doc_id, "_score": score, "_source": {"record": doc["record"]}}
            for score, doc_id, doc in scored[: body["size"]]
        ]
        return {"hits": {"hits": hits}}
