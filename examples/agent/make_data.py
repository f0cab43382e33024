"""Writes numbers.jsonl: 400 numbers to find, each with a first guess as a demonstration."""

import json
import random

rng = random.Random(0)
with open("numbers.jsonl", "w") as file:
    for low in range(1, 401):
        secret, guess = rng.randint(low, low + 7), rng.randint(low, low + 7)
        row = {"prompt": f"A number from {low} to {low + 7}:", "response": str(guess), "secret": secret}
        file.write(json.dumps(row) + "\n")
