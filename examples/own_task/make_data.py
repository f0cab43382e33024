"""Writes sort.jsonl: 4,000 problems, half of their demonstrations wrong."""

import json
import random

rng = random.Random(0)
with open("sort.jsonl", "w") as file:
    for _ in range(4000):
        letters = rng.sample("abcdefghijklmnopqrstuvwxyz", 4)
        answer = sorted(letters) if rng.random() < 0.5 else letters
        row = {"prompt": f"sort {' '.join(letters)}\n", "response": " ".join(answer), "letters": letters}
        file.write(json.dumps(row) + "\n")
