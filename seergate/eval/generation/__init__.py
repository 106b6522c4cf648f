"""Generation of samples: by transformers with continuous batching, on several machines, or by a server."""
