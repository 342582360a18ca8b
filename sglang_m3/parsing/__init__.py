"""Reads what MiniMax-M3 writes: reasoning, answers and tool calls.

`parser` is the grammar, a state machine that imports nothing but the standard library. `reasoning` and
`tool_calls` are SGLang's two detectors around it, and `register` puts them under the names `minimax-m3`.
`requests` mends what SGLang makes of requests for M3, and `replies` what it makes of replies.
"""
