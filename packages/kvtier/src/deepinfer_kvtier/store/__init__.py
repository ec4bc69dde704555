"""The directory on disk: segments, index logs, and who shares them."""
