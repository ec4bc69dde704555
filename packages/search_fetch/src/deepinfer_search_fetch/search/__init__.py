"""Query parsing, retrieval, relevance, order, snippets."""
