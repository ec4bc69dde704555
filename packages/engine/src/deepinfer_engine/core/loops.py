"""The loop a configuration asks for."""

from __future__ import annotations

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.loop import EngineLoop, PrefixLink, Sink
from deepinfer_engine.core.overlap import OverlappedLoop
from deepinfer_engine.core.plan import Parking, Role
from deepinfer_engine.core.runner import StepRunner


def engine_loop(
    runner: StepRunner,
    config: EngineConfig,
    role: Role,
    *,
    parking: Parking,
    link: PrefixLink | None,
    sink: Sink,
) -> EngineLoop:
    """Overlapped or plain; both say the same."""
    kind = OverlappedLoop if config.overlap else EngineLoop
    return kind(runner, config, role, parking=parking, link=link, sink=sink)
