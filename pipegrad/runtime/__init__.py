"""What drives the gradient layer: a pipeline's runtime, ours or torch's."""
