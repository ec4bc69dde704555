"""What outlives a request: kept answers, sealed reasoning."""
