"""Values, settings, buffers, identity and files: what every layer above needs."""
