"""The server over HTTP: its application, connections, errors and metrics."""
