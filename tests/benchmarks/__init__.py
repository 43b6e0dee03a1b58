"""Measurements. `make bench` compares the product with other programs in one run."""
