"""The server: the app, the capture hook, the audit and its report."""
