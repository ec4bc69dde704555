"""Model text, in any cut, to reasoning, content and tool calls."""
