"""The calls an engine makes."""
