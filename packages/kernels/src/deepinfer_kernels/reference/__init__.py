"""Plain torch forms, written to be read. They are the oracle of every other back end."""
