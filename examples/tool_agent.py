"""The tool task of tool_task.py, played by a program that does not use inflight, only Python's standard library.

    python examples/tool_agent.py [chat | messages | responses]

It reads its item from standard input, as one line of JSON, and prints its reward as the last line. It calls the model
at OPENAI_BASE_URL, through chat completions or Responses, or at ANTHROPIC_BASE_URL, through Anthropic's Messages.
"""

import json
import os
import sys
import urllib.request

NAME, DESCRIPTION = "look", "Says what is at a place."
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}


def post(url, body, **headers):
    content = json.dumps({"model": "vault", **body}).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def openai(path, body):
    return post(f"{os.environ['OPENAI_BASE_URL']}{path}", body, Authorization=f"Bearer {os.environ['OPENAI_API_KEY']}")


# Each `ask_` function calls the model, adds the reply to the history, and returns the reply's text and tool calls. Each
# `result_` function adds the result of a tool call to the history.


def ask_chat(history):
    tool = {"type": "function", "function": {"name": NAME, "description": DESCRIPTION, "parameters": SCHEMA}}
    reply = openai("/chat/completions", {"messages": history, "tools": [tool]})["choices"][0]["message"]
    history.append(reply)
    calls = reply.get("tool_calls") or []
    return reply["content"], [(call["id"], json.loads(call["function"]["arguments"])) for call in calls]


def result_chat(history, call_id, found):
    history.append({"role": "tool", "tool_call_id": call_id, "content": found})


def ask_messages(history):
    tool = {"name": NAME, "description": DESCRIPTION, "input_schema": SCHEMA}
    body = {"max_tokens": 1000, "messages": history, "tools": [tool]}
    headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "anthropic-version": "2023-06-01"}
    reply = post(f"{os.environ['ANTHROPIC_BASE_URL']}/v1/messages", body, **headers)["content"]
    history.append({"role": "assistant", "content": reply})
    text = "".join(block["text"] for block in reply if block["type"] == "text")
    return text, [(block["id"], block["input"]) for block in reply if block["type"] == "tool_use"]


def result_messages(history, call_id, found):
    result = {"type": "tool_result", "tool_use_id": call_id, "content": found}
    history.append({"role": "user", "content": [result]})


def ask_responses(history):
    tool = {"type": "function", "name": NAME, "description": DESCRIPTION, "parameters": SCHEMA}
    reply = openai("/responses", {"input": history, "tools": [tool]})["output"]
    history += reply
    text = "".join(part["text"] for item in reply if item["type"] == "message" for part in item["content"])
    calls = [item for item in reply if item["type"] == "function_call"]
    return text, [(call["call_id"], json.loads(call["arguments"])) for call in calls]


def result_responses(history, call_id, found):
    history.append({"type": "function_call_output", "call_id": call_id, "output": found})


def play(item, ask, result):
    """Return the reward of an episode."""
    history = [{"role": "user", "content": item["prompt"]}]
    num_found = 0
    for place, found in item["places"].items():
        _, calls = ask(history)
        if len(calls) != 1 or calls[0][1].get("at") != place:
            return num_found / 4
        num_found += 1
        result(history, calls[0][0], found)
    text, _ = ask(history)
    return num_found / 4 + (text == item["answer"]) / 2


APIS = {
    "chat": (ask_chat, result_chat),
    "messages": (ask_messages, result_messages),
    "responses": (ask_responses, result_responses),
}

if __name__ == "__main__":
    ask, result = APIS[sys.argv[1] if len(sys.argv) > 1 else "chat"]
    print(json.dumps({"reward": play(json.loads(sys.stdin.readline()), ask, result)}))
