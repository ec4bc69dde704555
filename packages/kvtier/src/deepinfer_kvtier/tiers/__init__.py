"""Tiers below the local directory: slower, larger, shared with other machines."""
