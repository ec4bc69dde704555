"""Generated loads, comparisons with published policies, pictures, and the live examples."""
