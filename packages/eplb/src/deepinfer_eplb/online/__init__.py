"""Balancing while serving: recorded loads, plans in the background, commits between steps."""
