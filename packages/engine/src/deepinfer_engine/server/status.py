"""`GET /status`: what a person, or `deepinfer top`, wants to see of a running server, as JSON."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from deepinfer_engine import __version__
from deepinfer_engine.router.client import WorkerStatus
from deepinfer_engine.server.health import can_serve, told
from deepinfer_engine.server.services import services_of

router = APIRouter(tags=["operation"])


@router.get("/status")
async def status(request: Request) -> dict[str, Any]:
    """Workers with their queues, and tokens, hits and times of the last minute."""
    services = services_of(request)
    services.check_details(request.headers)
    workers = await services.engine.status()
    draining = services.gate.draining
    state = "draining" if draining else "ready" if can_serve(workers) else "not ready"
    recent = services.history.look(services.metrics, services.clock.monotonic())
    return {
        "status": state,
        "version": __version__,
        "models": list(services.codec.model_names),
        "in_flight": services.gate.in_flight,
        "workers": [_worker(worker) for worker in workers],
        "problems": await services.engine.problems(),
        "recent": recent,
    }


_GAUGES = (
    "running", "waiting", "loading", "prefilling", "transferring", "parked", "reserve_queue",
    "blocks_free", "blocks_capacity",
)  # fmt: skip


def _worker(worker: WorkerStatus) -> dict[str, Any]:
    return {
        **told(worker, "draining"),
        **{name: int(worker.gauges[name]) for name in _GAUGES if name in worker.gauges},
    }
