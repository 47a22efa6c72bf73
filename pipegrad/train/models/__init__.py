"""How is the model of a job made? From a factory in parts, or as one of transformers."""
