"""Tiers on other machines, and what machines tell each other."""
