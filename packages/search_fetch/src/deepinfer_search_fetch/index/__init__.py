"""The index: analyzers, the Tantivy backend, ingestion, source authority."""
