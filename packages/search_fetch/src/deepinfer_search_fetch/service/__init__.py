"""The REST service: routes, keys, limits, the ledger."""
