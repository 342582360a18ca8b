"""Runs the doctor for several command lines in one process: a JSON list of lists in, one of results out."""

from __future__ import annotations

import contextlib
import io
import json
import sys

from sglang_m3.doctor.__main__ import main

results = []
for arguments in json.load(sys.stdin):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
    results.append([status, output.getvalue()])
json.dump(results, sys.stdout)
