"""Configurations of SGLang's BF16 experts for M3's shapes."""
