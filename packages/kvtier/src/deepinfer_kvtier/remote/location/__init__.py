"""Location service: which store or machine holds a record, as hints only."""

from __future__ import annotations

from typing import Final

DEFAULT_PORT: Final = 7420
