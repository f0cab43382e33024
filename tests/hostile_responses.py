"""Responses that a policy may learn to write, and that break what reads them carelessly."""

from __future__ import annotations

import json

HOSTILE = {
    "brackets": "[" * 100_000,
    "deep JSON": "[" * 20_000 + "]" * 20_000,
    "deep objects": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "a tower of powers": r"\boxed{9^{9^{9^9}}}",
    "many digits": "1" * 100_000,
    "JSON beyond every float": "[1e999999, -Infinity, NaN]",
    "half a surrogate pair": "\ud800 \\boxed{\udfff}",
    "NUL": "\0\\boxed{\0}\0",
    "backtracking": "a" * 40_000,
    "backtracking in JSON": json.dumps("a" * 40_000),
    "a nest of folders": "import os\nfor _ in range(1500):\n    os.mkdir('a')\n    os.chdir('a')\n",
    "a program that never ends": "while True: pass",
    "nothing": "",
    "ends of lines": "\r\n\u2028\x85" * 20_000,
    "fences": "```\n" * 20_001,
}
"""By what is hostile about them."""

SLOW = {
    "parentheses": r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}",
    "parentheses of a program": "(" * 3000 + "1" + ")" * 3000,
    "fractions": r"\boxed{" + r"\frac{1}{" * 1500 + "1" + "}" * 1501,
    "a million digits": "1" * 1_000_000,
    "digits in a box": r"\boxed{" + "1" * 1_000_000 + "}",
    "factorials": r"\boxed{((99999999!)!)!}",
    "a long sum": r"\boxed{\sum_{n=1}^{10^{12}} \frac{1}{n}}",
    "an integral": r"\boxed{\int_0^1 x^{x^{x^x}} dx}",
    "a large set": r"\boxed{\{" + ",".join(map(str, range(3000))) + r"\}}",
    "signs": r"\boxed{" + "-" * 3000 + "1}",
    "unions": r"\boxed{" + r"(1,2)\cup" * 300 + "(3,4)}",
    "an expansion": r"\boxed{((x+1)^{1000}+1)^{1000}}",
    "memory": "x = [0] * 10**10",
}
"""Responses that take long before something stops them."""
