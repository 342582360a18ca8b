"""Runs before any test module: Triton's interpreter, where there is no GPU, before anything imports Triton.

Other tests import SGLang, and with it Triton, which reads `TRITON_INTERPRET` then. Servers that tests start
must not inherit the variable (`launch.server`).
"""

from tests.kernels import sm90  # noqa: F401
