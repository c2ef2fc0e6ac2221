"""The method, the paper's Section 2: rows, search, constraints, bank, losses and the step that joins them."""
