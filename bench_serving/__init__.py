"""Agent-shaped load for SGLang servers, side by side with stock SGLang: `python -m bench_serving --help`."""
