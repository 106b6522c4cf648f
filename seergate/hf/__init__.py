"""The link to transformers' models: hooks, forward contexts, loading of models and gates, distillation losses."""
