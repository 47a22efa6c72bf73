"""Explains the time of a step of a simulated or recorded timeline, and finds shorter steps."""
