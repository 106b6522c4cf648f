"""Losses of gates, computed layer by layer in the forward pass of the frozen model."""
