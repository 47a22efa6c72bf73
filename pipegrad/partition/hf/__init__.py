"""Inputs and outputs of transformers models, and the reading and writing of stages' values."""
