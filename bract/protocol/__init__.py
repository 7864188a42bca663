"""What clients and server exchange, and what either side keeps of it."""
