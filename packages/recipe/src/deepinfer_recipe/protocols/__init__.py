"""The three public protocols: their bodies, their conversion, their events."""
