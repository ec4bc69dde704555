"""What operators run: checks, repairs, migration, the command line."""
