"""Writes sums.jsonl: 2,500 word problems as messages, half of the answers wrong by one."""

import json
import random

rng = random.Random(0)
names, things = ["Ann", "Tom", "Mia", "Leo", "Eva"], ["apples", "books", "coins", "cards", "shells"]
with open("sums.jsonl", "w") as file:
    for name in names:
        for thing in things:
            for a in range(10):
                for b in range(10):
                    total, wrong = a + b, rng.random() < 0.5
                    messages = [
                        {"role": "user", "content": f"{name} has {a} {thing} and gets {b} more. How many?"},
                        {"role": "assistant", "content": f"#### {total + wrong}"},
                    ]
                    row = {"messages": messages, "answer": f"{a}+{b}={total}\n#### {total}"}
                    file.write(json.dumps(row) + "\n")
