"""Hit rates and sizes without a cache: traces, policies, arithmetic."""
