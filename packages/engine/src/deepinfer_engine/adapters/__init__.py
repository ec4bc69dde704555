"""One module a sibling package: the only places that import it."""
