"""An agent that does not import inflight: it guesses a number with OpenAI's client, and prints its reward.

    inflight train examples/agent.toml

`inflight` runs it once for each episode, with the item on standard input. The client finds URL and key in the
environment.
"""

from __future__ import annotations

import json
import sys

import openai


def main() -> None:
    item = json.loads(sys.stdin.readline())
    client = openai.OpenAI()
    messages = [{"role": "user", "content": f"Guess my number between 0 and {item['largest']}."}]
    reward = 0.0
    for _ in range(3):
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        digits = "".join(filter(str.isdigit, answer.content or ""))[:6]
        if digits and int(digits) == item["number"]:
            reward = 1.0
            break
        hint = "Say a number." if not digits else "Higher." if int(digits) < item["number"] else "Lower."
        reward += 0.1 * bool(digits)
        messages += [answer, {"role": "user", "content": hint}]
    print(json.dumps({"reward": reward}))


if __name__ == "__main__":
    main()
