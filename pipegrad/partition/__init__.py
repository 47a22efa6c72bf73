"""Which layers are on which stage? An uncut model becomes the stages of a pipeline."""
