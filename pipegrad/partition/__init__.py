"""Cuts an uncut model between its layers into the stages of a pipeline."""
