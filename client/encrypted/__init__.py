"""A client's side of encrypted aggregation."""
