"""All that is known of transformers: families of models, hooks, loading, attaching methods and gates."""
