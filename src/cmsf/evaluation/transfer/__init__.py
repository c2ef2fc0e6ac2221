"""The transfer protocol: one linear layer for each of several data sets, its settings chosen on held-out images."""
