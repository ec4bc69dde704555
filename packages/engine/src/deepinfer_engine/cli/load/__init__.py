"""`deepinfer bench`: workloads, the clients that run them, and reports."""
