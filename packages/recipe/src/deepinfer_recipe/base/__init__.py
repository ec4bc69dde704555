"""What everything else stands on: errors, JSON text, small values."""
