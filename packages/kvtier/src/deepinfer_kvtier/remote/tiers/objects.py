"""Object storage behind five calls, with the failures of a network sorted into three kinds.

Everything else in this package sees `Absent`, `Exists` or `Unavailable`; texts of the storage
client are never passed on, since they may quote requests.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from deepinfer_kvtier.base.errors import ConfigError

_R = TypeVar("_R")
_PANIC = "PanicException"
_SECRETS = ("access_key_id", "secret_access_key", "session_token")


class Absent(Exception):  # noqa: N818 - an answer, not a fault
    """The object is not there."""


class Exists(Exception):  # noqa: N818 - an answer, not a fault
    """An object that was to be created is there already."""


class Unavailable(OSError):  # noqa: N818 - says what the store is
    """The store failed, timed out or refused."""


class S3TierConfig(BaseModel):
    """An object-storage tier.

    name:            of the tier in spans, metrics and costs.
    url:             "s3://bucket/prefix"; "file:///directory" and "memory:///name" for trials.
    endpoint:        of an S3-compatible service; None = AWS.
    access_key_id, secret_access_key, session_token: None = the AWS_* environment variables, or the
                     role of the machine. Never part of the URL, of `repr`, or of an error.
    timeout_s:       of one request, in seconds; max_retries: how often a failed one is repeated.
    poll_s:          seconds between two looks for what other writers have stored.
    linger_s:        seconds records may wait for a segment to fill up.
    segment_bytes:   records collected into one immutable object.
    grace_s:         seconds between taking a segment out of the manifest and deleting it.
    gc_interval_s:   seconds between two collections of this process.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: str
    name: str = "s3"
    endpoint: str | None = None
    region: str = "us-east-1"
    access_key_id: SecretStr | None = None
    secret_access_key: SecretStr | None = None
    session_token: SecretStr | None = None
    allow_http: bool = False
    timeout_s: float = Field(default=5.0, gt=0)
    max_retries: int = Field(default=2, ge=0, le=10)
    poll_s: float = Field(default=10.0, gt=0)
    linger_s: float = Field(default=2.0, ge=0)
    segment_bytes: int = Field(default=32 << 20, ge=8192, le=1 << 30)
    grace_s: float = Field(default=120.0, ge=0)
    gc_interval_s: float = Field(default=3600.0, gt=0)

    @classmethod
    def parse(cls, url: str) -> S3TierConfig:
        """From one URL, settings as query: "s3://bucket/prefix?endpoint=http://host:9000".

        raises: ConfigError, which never repeats the URL.
        """
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        if parts.password is not None or parts.username is not None or set(query) & set(_SECRETS):
            raise ConfigError(
                "an object-storage URL must not hold credentials, it would end up in logs:"
                " use the AWS_* environment variables or S3TierConfig"
            )
        try:
            return cls.model_validate({"url": parts._replace(query="").geturl(), **query})
        except ValidationError as cause:
            wrong = "; ".join(
                f"{'.'.join(str(at) for at in error['loc'])}: {error['msg']}"
                for error in cause.errors(include_input=False)
            )
            raise ConfigError(f"invalid object-storage tier: {wrong}") from None


class ObjectStore(Protocol):
    """What the tier needs of a store. Calls raise `Absent`, `Exists` or `Unavailable` only."""

    counts: Counter[str]

    def get(self, path: str) -> bytes: ...

    def get_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]: ...

    def create(self, path: str, content: Sequence[bytes | memoryview]) -> None: ...

    def list(self, prefix: str) -> list[tuple[str, datetime]]: ...

    def delete(self, path: str) -> None: ...


class Objects:
    """An obstore store below a prefix. Safe from several threads."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix.strip("/")
        self._obstore = _module("obstore")
        self._errors = _module("obstore.exceptions")
        self.counts: Counter[str] = Counter()

    def get(self, path: str) -> bytes:
        """A whole small object."""
        return bytes(self._call(lambda o: o.get(self._store, self._at(path)).bytes()))

    def get_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Byte ranges (start, end) of one object; neighbours travel in one request."""
        starts, ends = [r[0] for r in ranges], [r[1] for r in ranges]
        found = self._call(
            lambda o: o.get_ranges(self._store, self._at(path), starts=starts, ends=ends)
        )
        return [memoryview(part) for part in found]

    def create(self, path: str, content: Sequence[bytes | memoryview]) -> None:
        """Put an object that is not there yet, whole or not at all."""

        def work(o: Any) -> None:
            place = self._at(path)
            o.put(self._store, place, list(content), mode="create", use_multipart=False)

        try:
            self._call(work)
        except Absent:
            raise Unavailable("there is no such bucket") from None

    def list(self, prefix: str) -> list[tuple[str, datetime]]:
        """(path, time of last change) of everything below a prefix."""

        def work(o: Any) -> list[tuple[str, datetime]]:
            skip = len(self._prefix) + 1 if self._prefix else 0
            return [
                (str(meta["path"])[skip:], meta["last_modified"])
                for batch in o.list(self._store, self._at(prefix), chunk_size=1000)
                for meta in batch
            ]

        try:
            return self._call(work)
        except Absent:
            raise Unavailable("there is no such bucket") from None

    def delete(self, path: str) -> None:
        """Delete an object; one that is gone already is fine."""
        try:
            self._call(lambda o: o.delete(self._store, self._at(path)))
        except Absent:
            return

    def _at(self, path: str) -> str:
        return f"{self._prefix}/{path}" if self._prefix else path

    def _call(self, work: Callable[[Any], _R]) -> _R:
        self.counts["requests"] += 1
        try:
            return work(self._obstore)
        except (self._errors.NotFoundError, FileNotFoundError):
            raise Absent from None
        except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
            raise Exists from None
        except Exception as error:
            # Whatever a network and a client library can raise; its text may quote the request.
            self.counts["request_errors"] += 1
            raise Unavailable(type(error).__name__) from None
        except BaseException as error:
            # The client library panics where an object of a local store is shorter than it was, and
            # a panic is no Exception.
            if type(error).__name__ != _PANIC:
                raise
            self.counts["request_errors"] += 1
            raise Unavailable(_PANIC) from None


def open_objects(config: S3TierConfig) -> Objects:
    """Connect lazily to the store of a config. raises: ConfigError."""
    stores = _module("obstore.store")
    parts = urlsplit(config.url)
    if parts.scheme == "memory":
        return Objects(stores.MemoryStore(), parts.path)
    if (parts.scheme, bool(parts.netloc)) not in (("s3", True), ("file", False)):
        raise ConfigError("an object-storage URL looks like s3://bucket/prefix or file:///path")
    prefix = ""
    try:
        if parts.scheme == "file":
            store = stores.LocalStore(parts.path, mkdir=True)
        else:
            store, prefix = _s3_store(stores, parts.netloc, config), parts.path
    except Exception as cause:
        raise ConfigError(
            f"cannot set up the object store: {type(cause).__name__}; check url, endpoint, region"
        ) from None
    return Objects(store, prefix)


def _s3_store(stores: Any, bucket: str, config: S3TierConfig) -> Any:
    credentials = {
        name: value.get_secret_value()
        for name in _SECRETS
        if (value := getattr(config, name)) is not None
    }
    options: dict[str, Any] = {"region": config.region, **credentials}
    if config.endpoint is not None:
        options["endpoint"] = config.endpoint
    return stores.S3Store(
        bucket,
        config=options,
        client_options={
            "timeout": timedelta(seconds=config.timeout_s),
            "connect_timeout": timedelta(seconds=min(config.timeout_s, 2.0)),
            "allow_http": config.allow_http,
        },
        retry_config={
            "max_retries": config.max_retries,
            "retry_timeout": timedelta(seconds=config.timeout_s * (config.max_retries + 1)),
            "backoff": {
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timedelta(seconds=1),
                "base": 2,
            },
        },
    )


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as cause:
        raise ConfigError(
            'an object-storage tier needs the extra "s3": pip install "./packages/kvtier[s3]"'
        ) from cause
