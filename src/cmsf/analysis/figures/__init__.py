"""Figures: galleries, contact sheets, curves and tables as images."""
