"""What a step minimises, one objective a file."""

from cmsf.objectives.mean_shift import MeanShift, Outcome, Term, constrained_mean_shift

__all__ = ["MeanShift", "Outcome", "Term", "constrained_mean_shift"]
