"""Exchange of state windows between machines: who holds which, and pulling it from there.

A window is a state slot that lives in host memory of the machine that computed it. A location
service maps its key to that machine; entries are hints, so a wrong one costs one round trip and
never a wrong byte: whoever pulls verifies digest and checksum, and rebuilds the window when the
pull fails.
"""

from __future__ import annotations

from deepinfer_kvtier.base.config import WindowSettings
from deepinfer_kvtier.remote.state_exchange.locations import LocalLocations, WindowLocations
from deepinfer_kvtier.remote.state_exchange.wire import WindowRecord

__all__ = ["LocalLocations", "WindowLocations", "WindowRecord", "WindowSettings"]
