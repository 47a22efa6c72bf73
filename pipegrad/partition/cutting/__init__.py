"""Makes stages from a model, and runs the model's own code on each stage."""
