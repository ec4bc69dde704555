"""Probes. They read what the workers last reported and never wait for a model step."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from deepinfer_engine import __version__
from deepinfer_engine.codec.errors import AuthenticationFailed
from deepinfer_engine.router.client import WorkerStatus
from deepinfer_engine.server.services import Services, services_of

router = APIRouter(tags=["health"])


def can_serve(workers: list[WorkerStatus]) -> bool:
    """One ready worker that does everything, or one ready of each of the two kinds."""
    ready = {worker.role for worker in workers if worker.ready}
    return "single" in ready or {"prefill", "decode"} <= ready


@router.get("/health/live")
@router.get("/ping", include_in_schema=False)
async def live() -> dict[str, str]:
    """200 while this process answers at all."""
    return {"status": "alive"}


@router.get("/health")
@router.get("/health/ready")
async def ready(request: Request) -> Response:
    """200 when a request would be taken now, else 503; the body says which worker is missing."""
    services = services_of(request)
    workers = await services.engine.status()
    draining = services.gate.draining
    ok = can_serve(workers) and not draining
    state = "draining" if draining else "ready" if ok else "not ready"
    body: dict[str, Any] = {"status": state}
    try:
        services.check_details(request.headers)
    except AuthenticationFailed:
        pass  # a probe without a key learns what it needs
    else:
        body["in_flight"] = services.gate.in_flight
        body["workers"] = [told(worker, "epoch") for worker in workers]
        body["problems"] = await services.engine.problems()
    return JSONResponse(body, 200 if ok else 503)


@router.get("/version")
async def version(request: Request) -> dict[str, Any]:
    """Version of this package, and what it serves."""
    services: Services = services_of(request)
    return {"version": __version__, "models": list(services.codec.model_names)}


def told(worker: WorkerStatus, *more: str) -> dict[str, Any]:
    """A worker in an answer: who it is and whether it takes requests, and `more` of its fields."""
    names = ("name", "role", "ready", "detail", "pid", *more)
    return {name: getattr(worker, name) for name in names}
