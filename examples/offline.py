"""Complete prompts and answer a conversation in this process, without a server. Run it as `python examples/offline.py`."""
# ruff: noqa: INP001, T201 - a script, which prints

from samebit import LLM, SamplingParams


def main() -> None:
    """Print two completions, with logprobs of the first one's tokens, and one answer."""
    llm = LLM("nano")

    sampling = SamplingParams(temperature=0.6, top_p=0.9, seed=7, max_tokens=12, logprobs=0)
    outputs = llm.generate(["import os\n", "class Node:\n"], sampling)
    for output in outputs:
        print(repr(output.prompt), "->", repr(output.outputs[0].text))

    first = outputs[0].outputs[0]
    for token_id, likely in zip(first.token_ids, first.logprobs or [], strict=True):
        print(f"  token {token_id:4d}  logprob {likely[token_id].logprob:.6f}  rank {likely[token_id].rank}")

    conversation = [
        {"role": "user", "content": "The access code of the amber lighthouse is 4821."},
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": "What is the access code of the amber lighthouse?"},
    ]
    [answer] = llm.chat(conversation, SamplingParams(temperature=0.0, max_tokens=40))
    print(answer.outputs[0].text)


if __name__ == "__main__":
    main()
