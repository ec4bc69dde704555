"""Which rank holds which replicas: load model, replica counts, placing, searching."""
