"""The audit: attack what was captured, and score what came back."""
