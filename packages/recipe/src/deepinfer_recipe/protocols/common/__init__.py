"""What the three protocols share: bodies, the rules of conversion, events."""
