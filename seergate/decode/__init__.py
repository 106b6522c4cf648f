"""A decode step: what is chosen, what is read, what is counted, what is corrected."""
