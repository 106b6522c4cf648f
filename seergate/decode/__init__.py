"""A decode step: the choice of blocks, attention to them, statistics, traces and corrections."""
