"""From request parameters to the arrays that drafting and verification take."""
