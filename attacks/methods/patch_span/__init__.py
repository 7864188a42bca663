"""What entered a convolution, from the row space of its gradient; then the image from that."""
