"""What entered a layer, read off the gradient of its weight."""
