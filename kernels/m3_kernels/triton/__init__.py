"""The operators in Triton, one file each; the prefix names the GPU architecture they are tuned for."""
