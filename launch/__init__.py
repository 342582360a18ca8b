"""Ways to start a server."""
