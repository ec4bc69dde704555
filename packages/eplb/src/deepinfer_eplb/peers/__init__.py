"""Interfaces of other balancers: the open EPLB entry point, vLLM's policy class, SGLang's files."""
