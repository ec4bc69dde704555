"""Stores below the local folder."""
