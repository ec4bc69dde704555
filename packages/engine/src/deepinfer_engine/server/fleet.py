"""Routes about the workers: which there are, emptying one, and hearing from new ones."""

from __future__ import annotations

import logging
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepinfer_engine.codec.errors import InvalidRequest, PermissionDenied
from deepinfer_engine.errors import TransferError
from deepinfer_engine.pd.announcing import MAX_BYTES, PATH, SIGNATURE_HEADER
from deepinfer_engine.router.client import Fleet
from deepinfer_engine.server.health import told
from deepinfer_engine.server.limits import BodyLimit, check_declared_length, read_body
from deepinfer_engine.server.services import Services, services_of

log = logging.getLogger(__name__)

router = APIRouter(tags=["operation"])

_LIMIT = BodyLimit(MAX_BYTES)


class DrainOrder(BaseModel):
    """Which worker takes nothing new: `worker` by its address, or the whole server without one."""

    model_config = ConfigDict(extra="forbid")

    worker: Annotated[str | None, Field(max_length=512)] = None
    on: bool = True
    """False: it takes requests again."""
    move: bool = False
    """What the worker runs goes on with others, from where it is."""


@router.get("/admin/workers")
async def workers(request: Request) -> dict[str, Any]:
    """Every worker with what it runs for this server, and the server itself."""
    services = services_of(request)
    services.admin.check(request.headers)
    return await _fleet(services)


@router.post("/admin/drain")
async def drain(request: Request) -> dict[str, Any]:
    """Take nothing new, at one worker or here; returns at once, with how much still runs."""
    services = services_of(request)
    services.admin.check(request.headers)
    order = _read(await _body(request, services))
    if order.worker is None:
        if order.move:
            raise InvalidRequest("a whole server cannot be moved; name a worker", param="move")
        services.gate.draining = order.on
    elif isinstance(services.engine, Fleet):
        await services.engine.drain(order.worker, on=order.on, move=order.move)
    else:
        raise InvalidRequest("this server is one process and has no workers", param="worker")
    log.info("%s: drain %s", order.worker or "this server", "on" if order.on else "off")
    return await _fleet(services)


@router.post(PATH, include_in_schema=False)
async def announce(request: Request) -> dict[str, str]:
    """A worker says that it is there; signed with the cluster key."""
    services = services_of(request)
    if not isinstance(services.engine, Fleet):
        raise PermissionDenied("this server is one process and has no workers")
    body = await _body(request, services)
    try:
        address = services.engine.hear(body, request.headers.get(SIGNATURE_HEADER, ""))
    except TransferError as error:
        raise PermissionDenied(str(error)) from None
    return {"known": address}


async def _body(request: Request, services: Services) -> bytes:
    check_declared_length(request.headers.get("content-length"), _LIMIT)
    with services.bodies.holding(None) as held:
        return await read_body(request.receive, _LIMIT, held)


def _read(body: bytes) -> DrainOrder:
    try:
        return DrainOrder.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"{name or 'the body'}: {first['msg']}", param=name) from None


async def _fleet(services: Services) -> dict[str, Any]:
    gate = services.gate
    return {
        "draining": gate.draining,
        "running": gate.in_flight,
        "workers": [
            told(worker, "epoch", "draining", "running")
            for worker in await services.engine.status()
        ],
    }
