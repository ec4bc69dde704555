"""Routes for the operator: Prometheus, and making the prompt cache durable."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from deepinfer_engine.server.services import services_of

router = APIRouter(tags=["operation"])


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text, or OpenMetrics when the `Accept` header asks for it."""
    services = services_of(request)
    services.check_details(request.headers)
    workers = await services.engine.status()
    if services.compat is not None:
        services.compat.show(workers)
    services.metrics.edge.show(services.connections, services.tokenisers, services.bodies)
    body, content_type = services.metrics.render(workers, request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


@router.post("/admin/flush")
async def flush(request: Request) -> dict[str, bool]:
    """Returns when all that the prompt cache was given would survive `kill -9` of everything."""
    services = services_of(request)
    services.admin.check(request.headers)
    await services.engine.flush()
    return {"flushed": True}
