"""Images from the first layer of a vision transformer, and from its position embedding."""
