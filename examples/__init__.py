"""Agent programs to run against a server that `make serve` started."""
