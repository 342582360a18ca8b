"""SGLang model files for M3, and what becomes of each checkpoint tensor."""
