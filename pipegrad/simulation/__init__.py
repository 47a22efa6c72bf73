"""Simulation of steps: their time, its causes, and faster schedules and cuts. Without torch."""
