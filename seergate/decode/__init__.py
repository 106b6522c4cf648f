"""Decode steps: selection of blocks, attention, statistics, traces and corrections."""
