"""Where keys and values live: rows, and the kinds of memory that hold them."""
