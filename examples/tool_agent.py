"""The tool task of tool_task.py, played by a program that does not import inflight, only Python's standard library.

Its item comes as a line of JSON, its model from OPENAI_BASE_URL, and its reward is the last line that it prints.
"""

import json
import os
import sys
import urllib.request


def chat(messages):
    body = {"model": "vault", "messages": messages, "tools": [LOOK]}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]


LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Says what is at a place.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
item = json.loads(sys.stdin.readline())
messages = [{"role": "user", "content": item["prompt"]}]
num_found = 0
for place, found in item["places"].items():
    reply = chat(messages)
    calls = reply.get("tool_calls") or []
    if len(calls) != 1 or json.loads(calls[0]["function"]["arguments"]).get("at") != place:
        print(json.dumps({"reward": num_found / 4}))
        sys.exit()
    num_found += 1
    messages += [reply, {"role": "tool", "tool_call_id": calls[0]["id"], "content": found}]
reply = chat(messages)
print(json.dumps({"reward": num_found / 4 + (reply["content"] == item["answer"]) / 2}))
