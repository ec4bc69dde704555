"""deepinfer-engine: a DeepSeek-V4.1 runtime and a prefill/decode disaggregated server."""

from __future__ import annotations

__version__ = "0.1.0"
