"""GradInversion and the consensus of its restarts."""
