"""Row span: rows of a table whose hidden features lie in the span of a layer's gradient."""
