"""MXFP8 weights for M3: SGLang's quantisation method of that name, loading, linears and experts."""
