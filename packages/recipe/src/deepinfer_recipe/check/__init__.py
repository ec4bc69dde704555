"""Conformance checks behind `deepinfer-recipe check`: of this library, or of a server over HTTP."""
