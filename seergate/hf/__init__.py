"""The only place that touches transformers' internals: families, hooks, what a call of the model is, loading."""
