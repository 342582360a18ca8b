"""`python -m sglang_m3.doctor`: what will run on a machine, what will not, and why. Loads no weights."""
