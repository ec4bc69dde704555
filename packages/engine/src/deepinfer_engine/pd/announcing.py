"""A worker tells routers that it is there: by HTTP, signed with the cluster key, every few seconds.

What is told is an address and nothing secret; the router then connects to it with the handshake
that proves the cluster key on both sides. The signature keeps strangers from naming addresses, and
the number, which only grows within a run of the worker, keeps them from repeating old words.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepinfer_engine.errors import ConfigError, TransferError
from deepinfer_engine.pd import transport
from deepinfer_engine.pd.quoting import quoted
from deepinfer_engine.pd.wire import VERSION

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

PATH = "/workers/announce"
SIGNATURE_HEADER = "x-deepinfer-signature"
MAX_BYTES = 4096
EVERY_S = 3.0
TIMEOUT_S = 5.0

WorkerRole = Literal["prefill", "decode", "encode"]
WORKER_ROLES: tuple[WorkerRole, ...] = ("prefill", "decode", "encode")


class Announcement(BaseModel):
    """What a worker says of itself. `number` grows within an epoch; `leaving`: give it nothing
    more, what runs may end."""

    model_config = ConfigDict(extra="forbid", strict=True)

    protocol: int
    role: WorkerRole
    address: Annotated[str, Field(max_length=512)]
    epoch: Annotated[int, Field(ge=0, lt=1 << 64)]
    number: Annotated[int, Field(ge=0, lt=1 << 63)]
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Announcing:
    """To which routers a worker tells that it is there (http://host:port), and as what address;
    None: the one that it listens on."""

    routers: Sequence[str]
    address: str | None = None


def signature(cluster_key: bytes, body: bytes) -> str:
    """What only those who have the cluster key can say of these bytes."""
    key = hashlib.blake2b(b"announcements", key=cluster_key[:64], digest_size=32).digest()
    return hashlib.blake2b(body, key=key, digest_size=32).hexdigest()


def read_announcement(cluster_key: bytes, body: bytes, signed: str) -> Announcement:
    """The words of a worker that knows the key. Raises TransferError."""
    if not hmac.compare_digest(signature(cluster_key, body).encode(), signed.encode()):
        raise TransferError("the announcement is not signed with this router's cluster key")
    try:
        said = Announcement.model_validate_json(body)
        transport.parse_address(said.address)
    except (ValidationError, ConfigError) as error:
        raise TransferError(f"not an announcement of a worker: {quoted(error)}") from None
    if said.protocol != VERSION:
        raise TransferError(
            f"the worker at {said.address} speaks protocol {said.protocol}, this router {VERSION}: "
            "install the same release everywhere"
        )
    return said


class Announcer:
    """Tells every router of a worker until it leaves. A router that does not answer is told again
    the next time, and does not keep the others from hearing."""

    def __init__(
        self,
        routers: Sequence[str],
        cluster_key: bytes | None,
        *,
        role: WorkerRole,
        address: str,
        epoch: int,
        every_s: float = EVERY_S,
    ) -> None:
        """Raises ConfigError without a cluster key, or for an address nobody can connect to."""
        if cluster_key is None:
            raise ConfigError(
                "a worker that registers signs with the cluster key: set DEEPINFER_CLUSTER_KEY "
                "here and at the router (make one with `openssl rand -hex 32`)"
            )
        host, port = transport.parse_address(address)
        if host in ("0.0.0.0", "::") or port == 0:
            raise ConfigError(
                f"{address} is no address that a router can connect to: name one with --advertise"
            )
        self._routers = [router.rstrip("/") for router in routers]
        self._key = cluster_key
        self._said = Announcement(
            protocol=VERSION, role=role, address=address, epoch=epoch, number=0
        )
        self._numbers = itertools.count(1)
        self._every_s = every_s
        self._failing: set[str] = set()

    async def run(self) -> None:
        """Until cancelled."""
        async with _client() as client:
            while True:
                await self._tell_all(client, leaving=False)
                await asyncio.sleep(self._every_s)

    async def leave(self) -> None:
        """Tell once that nothing new shall come."""
        async with _client() as client:
            await self._tell_all(client, leaving=True)

    async def _tell_all(self, client: httpx.AsyncClient, *, leaving: bool) -> None:
        said = self._said.model_copy(update={"number": next(self._numbers), "leaving": leaving})
        body = said.model_dump_json().encode()
        headers = {
            SIGNATURE_HEADER: signature(self._key, body),
            "content-type": "application/json",
        }
        await asyncio.gather(*(self._tell(client, r, body, headers) for r in self._routers))

    async def _tell(
        self, client: httpx.AsyncClient, router: str, body: bytes, headers: dict[str, str]
    ) -> None:
        import httpx

        try:
            answer = await client.post(router + PATH, content=body, headers=headers)
            problem = "" if answer.status_code == 200 else f"{answer.status_code} {answer.text}"
        except httpx.HTTPError as error:
            problem = str(error) or type(error).__name__
        if problem and router not in self._failing:
            log.warning("the router %s does not take this worker: %s", router, quoted(problem))
            self._failing.add(router)
        elif not problem and router in self._failing:
            log.info("the router %s takes this worker now", router)
            self._failing.discard(router)


def _client() -> httpx.AsyncClient:
    import httpx  # of a worker that registers alone

    return httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False)
