"""The tests. A package, so that `tests.models` always means ours, whatever else is installed."""
