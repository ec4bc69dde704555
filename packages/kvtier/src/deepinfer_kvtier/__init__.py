"""Tiered cache for attention state: find, load, store, expire and repair it."""

from __future__ import annotations

__version__ = "0.1.0"
