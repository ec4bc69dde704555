"""Kept Responses answers and sealed reasoning, as the server asks `deepinfer_recipe` for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer_engine.adapters.recipe import (
    ConversionError,
    MemoryResponseStore,
    MissingExtraError,
    ReasoningSealer,
    ResponseStore,
    SqliteResponseStore,
    StoredResponse,
    StoreError,
    input_item_list,
)
from deepinfer_engine.codec.errors import InvalidRequest
from deepinfer_engine.errors import ConfigError, EngineUnavailable
from deepinfer_engine.settings import REASONING_KEYS_ENV


class RecipeResponses:
    """Kept answers as the routes ask for them; see `codec.protocol.KeptResponses`."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def get(self, owner: str, response_id: str) -> dict[str, Any] | None:
        found = self._find(owner, response_id)
        return None if found is None else found.response

    def input_items(
        self, owner: str, response_id: str, *, limit: int, after: str | None, order: str
    ) -> dict[str, Any] | None:
        found = self._find(owner, response_id)
        if found is None:
            return None
        try:
            return input_item_list(found, limit=limit, after=after, order=order)
        except ConversionError as exc:
            raise InvalidRequest(exc.message, param=exc.param) from exc

    def delete(self, owner: str, response_id: str) -> bool:
        try:
            return self._store.delete(owner, response_id)
        except StoreError as exc:
            raise EngineUnavailable(f"kept responses cannot be deleted: {exc}") from exc

    def _find(self, owner: str, response_id: str) -> StoredResponse | None:
        try:
            return self._store.get(owner, response_id)
        except StoreError as exc:
            raise EngineUnavailable(f"kept responses cannot be read: {exc}") from exc


def open_responses(where: str | None) -> ResponseStore | None:
    """The store of a setting: None, `memory` or `sqlite:PATH`. Raises ConfigError."""
    if where is None:
        return None
    if where == "memory":
        return MemoryResponseStore()
    try:
        return SqliteResponseStore(where.partition(":")[2])
    except StoreError as exc:
        raise ConfigError(f"responses_store: {exc}") from exc


def read_sealer(environ: Mapping[str, str]) -> ReasoningSealer | None:
    """What seals reasoning, from the keys in the environment. Raises ConfigError."""
    text = environ.get(REASONING_KEYS_ENV)
    if not text:
        return None
    try:
        return ReasoningSealer.from_text(text)
    except (ValueError, MissingExtraError) as exc:
        raise ConfigError(f"{REASONING_KEYS_ENV}: {exc}") from exc
