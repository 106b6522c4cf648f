"""The tests. A package, so that `tests.support.models` always means ours, whatever else is installed."""
