"""The front door: one request and its answers, from body to wire."""
