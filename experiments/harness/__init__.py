"""What all experiments share: images, clients, uploads, scores, command line, results."""
