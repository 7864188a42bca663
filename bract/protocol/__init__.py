"""Messages between clients and server, and the records that either side keeps."""
