"""Search and Fetch of a service elsewhere, with the methods of `AsyncSearchFetch`."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import BaseModel, ValidationError

from deepinfer_search_fetch.client import with_rules
from deepinfer_search_fetch.errors import (
    ContentError,
    InvalidRequestError,
    SearchFetchError,
    UpstreamError,
    error_from_body,
)
from deepinfer_search_fetch.models import FetchRequest, FetchResponse, SearchRequest, SearchResponse

if TYPE_CHECKING:
    import httpx

M = TypeVar("M", bound=BaseModel)
_MARGIN_SECONDS = 5.0


class RemoteSearchFetch:
    """A `search-fetch serve` reached over HTTP (needs the `remote` extra, httpx).

    base_url: such as http://127.0.0.1:8900; api_key: sent as a bearer token.
    Errors of the service arrive as the errors they were there.

    Raises ContentError where an extra is missing.
    """

    def __init__(
        self, base_url: str, api_key: str | None = None, *, transport: Any | None = None
    ) -> None:
        try:
            import httpx
        except ImportError:
            raise ContentError(
                "feature_unavailable",
                "a remote service needs the extra: pip install './packages/search_fetch[remote]'",
            ) from None
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._errors = (httpx.HTTPError, httpx.InvalidURL)
        self._http: httpx.AsyncClient = httpx.AsyncClient(
            base_url=base_url, headers=headers, transport=transport, trust_env=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def search(self, request: SearchRequest) -> SearchResponse:
        """As `AsyncSearchFetch.search`."""
        return await self._post("/v1/search", request, SearchResponse, 30.0)

    async def fetch(
        self,
        request: FetchRequest,
        *,
        allowed_domains: Sequence[str] = (),
        blocked_domains: Sequence[str] = (),
        network: bool = True,
    ) -> FetchResponse:
        """As `AsyncSearchFetch.fetch`; the lists hold for every redirect there."""
        wanted = with_rules(request, allowed_domains, blocked_domains, network=network)
        return await self._post("/v1/fetch", wanted, FetchResponse, request.timeout)

    async def _post(self, path: str, body: BaseModel, answer: type[M], seconds: float) -> M:
        content = body.model_dump_json(exclude_defaults=True)
        headers = {"Content-Type": "application/json"}
        if self._http.is_closed:
            raise InvalidRequestError("invalid_argument", "this client is closed; make a new one")
        try:
            reply = await self._http.post(
                path, content=content, headers=headers, timeout=seconds + _MARGIN_SECONDS
            )
        except self._errors as error:
            raise UpstreamError(
                "connect_failure", f"the search-fetch service does not answer: {error!r}"
            ) from None
        try:
            if reply.status_code == 200:
                return answer.model_validate_json(reply.content)
            raise error_from_body(reply.json(), reply.status_code)
        except (ValidationError, ValueError):
            raise SearchFetchError(
                "internal", f"no search-fetch service answers {path}: HTTP {reply.status_code}"
            ) from None
