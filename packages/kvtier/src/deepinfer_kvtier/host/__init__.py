"""Host memory and the policies that decide what leaves it."""
