"""Metrics of runs and their intervals."""
