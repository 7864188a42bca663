"""Messages between clients and server: what each holds, and how it is read and written."""
