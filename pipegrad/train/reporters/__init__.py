"""Where do the metrics of a run go? `reporter` has the contract, `report` runs the reporters."""
