"""Writes programs.jsonl: 1,200 functions of one line, half of their demonstrations wrong."""

import json
import operator
import random

rng = random.Random(0)
signs = {"adds": "+", "takes": "-", "multiplies by": "*"}
results = {"+": operator.add, "-": operator.sub, "*": operator.mul}
with open("programs.jsonl", "w") as file:
    for a in range(200):
        for verb, sign in signs.items():
            for order in ("first", "then"):
                right, wrong = f"x{sign}{a}", f"x{rng.choice('+-*')}{a + rng.randint(1, 3)}"
                words = f"f {verb} {a}" if order == "first" else f"write a function that {verb} {a}"
                given = right if rng.random() < 0.5 else wrong
                row = {
                    "prompt": words,
                    "tests": "".join(f"assert f({x}) == {results[sign](x, a)}\n" for x in (3, 17)),
                    "response": f"def f(x): return {given}",
                }
                file.write(json.dumps(row) + "\n")
