"""The way of records that are loaded: turns, tiers, parts."""
