"""Reporters of the metrics of a run: `reporter` has the contract; the others are plug-ins."""
