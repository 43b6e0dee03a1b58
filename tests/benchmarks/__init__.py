"""Measurements. `make bench` compares us with others, side by side in one run."""
