"""Pictures: where they come from, how they are prepared, how many tokens they take."""
