"""Drafters and the checkpoints they read. n-grams and mixtures need numpy, the others torch."""
