"""Networks: backbones, encoders and heads, their precision and their weights."""
