"""Which encode workers a prefill worker may ask for the embeddings of pictures."""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer_engine.router.link import WorkerLink

MOST = 64
"""That a request names."""


def encoders_of(prefill: WorkerLink, links: Iterable[WorkerLink]) -> tuple[tuple[str, int], ...]:
    """Address and epoch of those that are ready and run the same model in the same arithmetic."""
    return tuple(
        (link.address, link.info.epoch)
        for link in links
        if link.ready and link.info is not None and _fits(prefill, link)
    )[:MOST]


def without_encoder(links: Iterable[WorkerLink]) -> list[str]:
    """One line for each prefill worker whose pictures nobody can encode now."""
    every = list(links)
    return [
        f"prefill {link.address}: no encode worker of its model is ready, and requests with "
        "pictures are refused"
        for link in every
        if link.role == "prefill"
        and link.ready
        and link.info is not None
        and link.info.encoding == "workers"
        and not encoders_of(link, every)
    ]


def _fits(prefill: WorkerLink, encode: WorkerLink) -> bool:
    mine, its = prefill.info, encode.info
    if encode.role != "encode" or mine is None or its is None:
        return False
    return (mine.version, mine.model, mine.dtype) == (its.version, its.model, its.dtype)
