"""Measurements of the product's parts, each beside a bound taken in the same run: `python -m benchmarks.<name>`."""
