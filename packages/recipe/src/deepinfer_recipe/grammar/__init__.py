"""Output constraints as grammars, and grammars at work."""
