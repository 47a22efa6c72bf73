"""Where do the metrics of a run go? `reporter` has the contract; the others are plug-ins."""
