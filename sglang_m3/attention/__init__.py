"""Attention for M3 in SGLang: the pool of pages, what a step shares, the backend that calls the operators."""
