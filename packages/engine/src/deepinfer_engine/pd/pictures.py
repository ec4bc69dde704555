"""Embeddings of a prompt's pictures, got from encode workers before the prompt is read.

Only of those that the cached prefix does not cover and that are not kept here. A picture goes to
the worker that its digest names, so that whoever asks for it again finds it cached there; where
that one fails, to another.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deepinfer_engine.core.pictures import Picture, RowForm
from deepinfer_engine.core.sequence import LiveSequence
from deepinfer_engine.core.windows import Prefix
from deepinfer_engine.errors import ConfigError, RequestError, TransferError
from deepinfer_engine.pd import transport
from deepinfer_engine.pd.encoder_link import EncoderLink, NotEncoded
from deepinfer_engine.pd.quoting import quoted
from deepinfer_engine.pd.rows import RowCache
from deepinfer_engine.pd.wire import Body, Xid

log = logging.getLogger(__name__)

CACHE_BYTES = 64 << 20
HELD_BYTES = 1 << 30
"""Embeddings of prompts that are being read."""
FAILURES = 2
"""Encode workers that a picture may fail on before it is refused."""
FAILURES_S = 60.0
"""How long a failure counts, and of how many pictures: somebody may try the same one again."""
MOST_FAILED = 1024
BUSY_S = 0.2

Place = tuple[str, int]
"""Address and epoch of an encode worker."""


class NoEncoder(Exception):  # noqa: N818 - a condition of the cluster
    """No encode worker can be asked for a picture now."""


@dataclass(eq=False, slots=True)
class _Prompt:
    xid: Xid
    salt: str
    encoders: Sequence[Place]
    fail: Callable[[str, str], None]
    task: asyncio.Task[None] | None = None
    held: int = 0


@dataclass(slots=True)
class _Failures:
    """Of one picture: where, when and how it failed last."""

    places: set[Place] = field(default_factory=set[Place])
    since: float = 0.0
    last: str = ""


class PictureClient:
    """Belongs to one event loop, except `gather`."""

    def __init__(
        self,
        form: RowForm,
        *,
        hello: Callable[[], Body],
        cluster_key: bytes | None,
        post: Callable[..., None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        abort: Callable[[str], None],
        has_tower: bool,
        cache_bytes: int = CACHE_BYTES,
        held_bytes: int = HELD_BYTES,
    ) -> None:
        """post: run something on the event loop, from any thread. spawn: a task there. abort: end
        the sequence of a key. has_tower: pictures that no encode worker takes are encoded here."""
        if not form.row_bytes:
            raise ConfigError(
                "encoding: this family does not say how wide its embeddings are; encode its "
                "pictures in the prefill workers (--encoding own)"
            )
        self._form = form
        self._hello = hello
        self._cluster_key = cluster_key
        self._post = post
        self._spawn = spawn
        self._abort = abort
        self._has_tower = has_tower
        self.cache = RowCache(cache_bytes)
        self._room = _Room(held_bytes)
        self._prompts: dict[str, _Prompt] = {}
        self._links: dict[str, asyncio.Task[EncoderLink]] = {}
        self._failed: OrderedDict[bytes, _Failures] = OrderedDict()
        """Pictures that failed lately."""
        self._pixel_bytes = 0
        self._counters = {
            "pictures_fetched": 0,
            "pictures_encoded_here": 0,
            "pictures_failed": 0,
            "pictures_refused": 0,
        }

    def follow(
        self, xid: Xid, salt: str, encoders: Iterable[Place], fail: Callable[[str, str], None]
    ) -> None:
        """A prompt with pictures has come. `fail(reason, message)` ends it."""
        self._prompts[xid.key] = _Prompt(xid, salt, tuple(encoders), fail)

    def forget(self, key: str) -> None:
        """It is over, or given up."""
        prompt = self._prompts.pop(key, None)
        if prompt is None:
            return
        self._room.give(prompt.held)
        if prompt.task is not None and prompt.task is not asyncio.current_task():
            prompt.task.cancel()

    def read(self, seq: LiveSequence) -> None:
        """Its prompt is computed: the embeddings are not needed any more."""
        prompt = self._prompts.get(seq.key)
        if prompt is not None:
            pictures = tuple(replace(p, rows=None) for p in seq.request.pictures)
            seq.request = replace(seq.request, pictures=pictures)
            self._room.give(prompt.held)
            prompt.held = 0

    def gather(self, seq: LiveSequence, prefix: Prefix, there: Callable[[], None]) -> bool:
        """See `core.loop.Gather`. From any thread."""
        wanted = [p for p in seq.request.pictures if p.rows is None and p.end > prefix.start]
        if wanted:
            self._post(self._begin, seq, wanted, there)
        return bool(wanted)

    def counters(self) -> dict[str, float]:
        return {
            **self._counters,
            "picture_cache_hits": self.cache.hits,
            "picture_pixel_bytes": self._pixel_bytes
            + sum(task.result().pixel_bytes for task in self._links.values() if _made(task)),
        }

    def gauges(self) -> dict[str, float]:
        return {
            "picture_cache_bytes": self.cache.nbytes,
            "picture_bytes_held": self._room.held,
            "picture_prompts": len(self._prompts),
        }

    # -- one prompt -----------------------------------------------------------------------------

    def _begin(
        self, seq: LiveSequence, wanted: Sequence[Picture], there: Callable[[], None]
    ) -> None:
        prompt = self._prompts.get(seq.key)
        if prompt is None:  # given up meanwhile; without rows it must not be read
            self._abort(seq.key)
            there()
        else:
            prompt.task = self._spawn(self._gather(prompt, seq, wanted, there))

    async def _gather(
        self,
        prompt: _Prompt,
        seq: LiveSequence,
        wanted: Sequence[Picture],
        there: Callable[[], None],
    ) -> None:
        fetches: list[asyncio.Task[memoryview | None]] = []
        try:
            await self._hold(prompt, sum(p.length for p in wanted) * self._form.row_bytes)
            fetches = [asyncio.create_task(self._fetch(prompt, p)) for p in wanted]
            rows = {p.start: r for p, r in zip(wanted, await asyncio.gather(*fetches), strict=True)}
            pictures = tuple(
                p if (its := rows.get(p.start)) is None else replace(p, rows=its, pixels=b"")
                for p in seq.request.pictures
            )
            seq.request = replace(seq.request, pictures=pictures)
        except RequestError as error:
            self._counters["pictures_refused"] += 1
            prompt.fail("request", str(error))
        except NoEncoder as error:
            prompt.fail("no_encoder", str(error))
        except Exception as error:
            log.exception("pictures of %s could not be fetched", seq.key)
            prompt.fail("engine", f"fetching pictures failed: {error}")
        finally:
            for fetch in fetches:
                fetch.cancel()
            if prompt.xid.key not in self._prompts:
                self._abort(seq.key)
            there()

    async def _hold(self, prompt: _Prompt, nbytes: int) -> None:
        """Room for the embeddings of a prompt, in turn."""
        if nbytes > self._room.limit:
            raise RequestError(
                f"the pictures of the prompt have {nbytes} bytes of embeddings, and a prefill "
                f"worker holds {self._room.limit}; send fewer or smaller ones"
            )
        await self._room.take(nbytes)
        if prompt.xid.key in self._prompts:
            prompt.held += nbytes
        else:
            self._room.give(nbytes)

    async def _fetch(self, prompt: _Prompt, picture: Picture) -> memoryview | None:
        """The rows of a picture; None: it is encoded here."""
        digest = picture.digest
        rows = self.cache.get(digest)
        if rows is not None:
            return rows
        avoided: set[Place] = set()
        busy: set[Place] = set()
        last = "no encode worker is ready"
        while True:
            last = self._check_failures(digest) or last
            place = self._choose(prompt.encoders, digest, avoided | busy)
            if place is None and busy:
                await asyncio.sleep(BUSY_S)
                busy.clear()
                continue
            if place is None:
                return self._here(digest, last)
            try:
                link = await self._link(*place)
                alone = digest in self._failed
                rows = await link.rows(prompt.xid, picture, prompt.salt, alone=alone)
            except (OSError, TransferError, TimeoutError) as error:
                last = f"cannot reach the encode worker {place[0]}: {quoted(error) or 'no answer'}"
                avoided.add(place)
            except NotEncoded as error:
                last = f"encode worker {place[0]}: {error}"
                if error.reason == "request":
                    raise RequestError(str(error)) from None
                if error.reason == "busy":
                    busy.add(place)
                    continue
                avoided.add(place)
                if error.reason in ("failed", "damaged") or error.begun:
                    self._fails(digest, place, last)
            else:
                self._counters["pictures_fetched"] += 1
                self._failed.pop(digest, None)
                self.cache.put(digest, rows)
                return rows

    def _here(self, digest: bytes, why: str) -> None:
        """No encode worker is left. What may have ended one is not tried in this process."""
        if not self._has_tower or digest in self._failed:
            raise NoEncoder(f"a picture could not be encoded: {why}")
        self._counters["pictures_encoded_here"] += 1

    def _choose(
        self, encoders: Sequence[Place], digest: bytes, avoided: set[Place]
    ) -> Place | None:
        """Rendezvous hashing: the same picture comes to the same worker from everywhere."""
        failed = self._failed[digest].places if digest in self._failed else ()
        left = [place for place in encoders if place not in avoided and place not in failed]
        return max(
            left, key=lambda p: hashlib.blake2b(p[0].encode(), key=digest).digest(), default=None
        )

    def _fails(self, digest: bytes, place: Place, why: str) -> None:
        self._counters["pictures_failed"] += 1
        failures = self._failed.pop(digest, None) or _Failures()
        failures.places.add(place)
        failures.since, failures.last = time.monotonic(), why
        self._failed[digest] = failures
        while len(self._failed) > MOST_FAILED:
            self._failed.popitem(last=False)

    def _check_failures(self, digest: bytes) -> str:
        """How it failed last, empty where it did not. Raises RequestError after too many."""
        failures = self._failed.get(digest)
        if failures is None:
            return ""
        if time.monotonic() - failures.since > FAILURES_S:
            del self._failed[digest]
            return ""
        if len(failures.places) >= FAILURES:
            raise RequestError(
                f"a picture could not be encoded by {len(failures.places)} encode workers, one "
                f"after the other; the last: {failures.last}"
            )
        return failures.last

    # -- links ----------------------------------------------------------------------------------

    async def _link(self, address: str, epoch: int) -> EncoderLink:
        """The one connection to an encode worker, made when first needed."""
        task = self._links.get(address)
        if task is not None and task.done() and not (_made(task) and not task.result().closed):
            if _made(task):
                self._pixel_bytes += task.result().pixel_bytes
            task = None
        if task is None:
            task = asyncio.get_running_loop().create_task(self._connect(address))
            self._links[address] = task
        # Shielded: the abort of one request must not end the link that others share.
        link = await asyncio.shield(task)
        if link.epoch != epoch:
            raise TransferError("the encode worker has been restarted")
        return link

    async def _connect(self, address: str) -> EncoderLink:
        try:
            connection = await transport.connect(address, self._hello(), self._cluster_key)
        except ConfigError as error:
            raise TransferError(str(error)) from None
        if connection.hello.get("role") != "encode":
            connection.close()
            raise TransferError(f"it is a {quoted(connection.hello.get('role'))} worker")
        link = EncoderLink(connection, self._form, address)
        self._spawn(link.run())
        return link


def _made(task: asyncio.Task[EncoderLink]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


class _Room:
    """Bytes that are taken in turn and given back."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, nbytes: int) -> None:
        """Wait until there is room, behind those who wait already."""
        if not self._queue and self.held + nbytes <= self.limit:
            self.held += nbytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((nbytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(nbytes)
            raise

    def give(self, nbytes: int) -> None:
        self.held -= nbytes
        while self._queue:
            wanted, turn = self._queue[0]
            if turn.done():
                self._queue.popleft()
                continue
            if self.held + wanted > self.limit:
                return
            self._queue.popleft()
            self.held += wanted
            turn.set_result(None)
