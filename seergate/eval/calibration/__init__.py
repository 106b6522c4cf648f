"""Options of methods that are found by measuring: budgets of equal bytes, layers, statistics of attention."""
