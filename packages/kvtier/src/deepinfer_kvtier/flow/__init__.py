"""How records move: lookups, loads, puts, and what is done with their bytes on the way."""
