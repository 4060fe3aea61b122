"""Talk to a running `samebit serve nano` with the openai client, streamed and not, and repeat an answer by its seed.

Run it as `python examples/openai_client.py [BASE_URL]`; it needs `pip install openai`.
"""
# ruff: noqa: INP001, T201 - a script, which prints

import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

CONVERSATION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "The access code of the amber lighthouse is 4821."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "What is the access code of the amber lighthouse?"},
]


def main(base_url: str) -> None:
    """Ask once streamed, then again with the seed that the first answer was drawn with."""
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id

    text, seed, usage = "", None, None
    stream = client.chat.completions.create(
        model=model, messages=CONVERSATION, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        seed = getattr(chunk, "seed", seed)  # in the first chunk; a field of ours, which the client keeps
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            print(choice.delta.content or "", end="", flush=True)
    print(f"\nseed {seed}, {usage.total_tokens if usage else 0} tokens")

    again = client.chat.completions.create(model=model, messages=CONVERSATION, seed=seed)
    details = again.usage.prompt_tokens_details if again.usage else None
    print(again.choices[0].message.content)
    print(f"{details.cached_tokens if details else 0} prompt tokens came from the cache")
    if again.choices[0].message.content != text:
        raise SystemExit("the same request and seed gave another answer")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
