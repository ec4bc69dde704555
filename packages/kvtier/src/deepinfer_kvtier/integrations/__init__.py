"""Thin modules that let other engines use the cache: `vllm` and `sglang`.

Each needs that engine installed beside this package and is imported by it, by name, from its own
configuration. Nothing here is imported by the rest of the package.
"""
