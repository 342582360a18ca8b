"""The operators in PyTorch: readable, unhurried, and the specification that every kernel must equal."""
