"""An agent as there are many: it speaks OpenAI's API, keeps its own history, and knows nothing of moerl."""

import json
import os
import sys
import urllib.request

URL = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
HEADERS = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}


def complete(messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    with urllib.request.urlopen(urllib.request.Request(URL, body, HEADERS)) as answer:
        return json.load(answer)["choices"][0]["message"]


question, secret = sys.argv[1], int(sys.argv[2])
messages = [{"role": "user", "content": question}]
found = False
for _ in range(4):
    message = complete(messages)
    text = message["content"] or ""
    found = text == str(secret)
    if found:
        break
    hint = "no number" if not text.isdigit() else "higher" if int(text) < secret else "lower"
    messages += [message, {"role": "user", "content": hint}]
print(float(found))
