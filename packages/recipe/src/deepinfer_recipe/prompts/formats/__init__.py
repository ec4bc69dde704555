"""Prompt formats, one module a version: only the bytes and the few rules that differ."""
