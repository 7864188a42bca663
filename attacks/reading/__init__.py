"""Read what entered a layer off the gradient of its weight."""
