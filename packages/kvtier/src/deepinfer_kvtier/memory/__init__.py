"""Host memory and the policies that decide who leaves it."""
