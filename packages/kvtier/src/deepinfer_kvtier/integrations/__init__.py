"""Thin modules that let other engines use the cache: `vllm`, `sglang`, and `group` for ranks.

The first two need that engine installed beside this package and are imported by it, by name, from
its own configuration. Nothing here is imported by the rest of the package.
"""
