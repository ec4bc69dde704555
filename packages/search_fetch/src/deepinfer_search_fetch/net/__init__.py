"""The guarded network: policy, one look-up, a connection to exactly the address that was vetted."""
