"""Looking at what was learned, and at what training did."""
