"""The command line, each command in a process of its own."""

import json
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-c", "from samebit.cli import app; app()"]
FAST = ["--num-threads", "1"]


def run(*arguments, text=None):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, input=text, check=False)


def test_help_names_the_commands_and_loads_nothing_heavy():
    done = run("--help")
    assert done.returncode == 0
    for name in ("serve", "generate", "chat"):
        assert name in done.stdout
    script = (
        "import sys\nfrom samebit.cli import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'fastapi', 'pydantic', 'zmq', 'numpy', 'tokenizers', 'msgspec'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_version_is_shown():
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("samebit ")


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["generate", "nonesuch", "--prompt", "a"], 1, "nonesuch"),
        (["serve", "nonesuch", "--port", "0"], 1, "nonesuch"),
        (["chat", "nonesuch"], 1, "nonesuch"),
        (["generate", "nano", "--input", "nowhere.jsonl"], 1, "nowhere.jsonl"),
        (["generate", "nano", "--prompt", "a", "--kernels", "magic"], 1, "magic"),
        (["generate", "nonesuch", "--prompt", "a", "--output", "no/where.jsonl"], 1, "no/where.jsonl"),
        (["serve", "nano", "--page-size", "0"], 1, "page_size=0"),
        (["generate", "nano", "--prompt", "a", "--temperature", "-1", *FAST], 1, "temperature"),
        (["generate", "nano", "--prompt", "a", "--speculative-config", "{"], 1, "speculative_config='{'"),
        (["generate", "nano", "--prompt", "a", "--speculative-config", '{"method": "magic"}'], 1, "magic"),
        (["chat", "nano", "--speculative-config", '{"method": "ngram", "k": 5}'], 1, "speculative_config.k=5"),
        (["serve", "nano", "--speculative-algorithm", "MAGIC"], 1, "MAGIC"),
        (["generate", "nano"], 2, "--prompt"),
        (["serve", "nano", "--port", "x"], 2, "--port"),
        (["serve", "nano", "--log-level", "loud"], 2, "loud"),
        (["nonesuch"], 2, "nonesuch"),
    ],
    ids=str,
)
def test_a_mistake_is_told_without_a_traceback(arguments, status, text):
    done = run(*arguments)
    assert done.returncode == status
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    if status == 1:
        assert done.stderr.startswith("samebit: error: ")
        assert len(done.stderr.splitlines()) == 1


def test_generate_completes_prompts_in_order():
    prompts = ["--prompt", "import os\n", "--prompt", "class A:\n"]
    flags = ["--max-tokens", "6", "--temperature", "0", *FAST]
    together = run("generate", "nano", *prompts, *flags)
    assert together.returncode == 0, together.stderr
    second = run("generate", "nano", *prompts[2:], *flags)
    assert second.stdout.strip()
    assert together.stdout.endswith(second.stdout)
    assert together.stdout != second.stdout


def test_generate_reads_and_writes_json_lines(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"prompt": "import os\n", "n": 2, "logprobs": 1},
        {"prompt": [1, 2, 3], "max_tokens": 3},
        {"messages": [{"role": "user", "content": "hi"}], "temperature": 0},
    ]
    source.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    done = run(
        "generate", "nano", "--input", str(source), "--output", str(target), "--max-tokens", "5", "--seed", "1", *FAST
    )
    assert done.returncode == 0, done.stderr
    outputs = [json.loads(line) for line in target.read_text().splitlines()]
    assert [len(output["outputs"]) for output in outputs] == [2, 1, 1]
    assert [len(output["outputs"][0]["token_ids"]) for output in outputs[:2]] == [5, 3]
    assert outputs[1]["prompt_token_ids"] == [1, 2, 3]
    assert outputs[0]["outputs"][0]["logprobs"] is not None
    assert outputs[1]["outputs"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"prompt": "a"', "line 2"),
        ('{"max_tokens": 1}', "line 2: needs either prompt or messages"),
        ('{"prompt": 5}', "line 2"),
        ("[1]", "line 2"),
        ('{"prompt": "a", "temprature": 1}', "temprature"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, text):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n' + line + "\n")
    done = run("generate", "nano", "--input", str(source), *FAST)
    assert done.returncode == 1
    assert text in done.stderr


def test_chat_remembers_until_it_is_reset():
    ask = "What is the code of the amber tower?"
    said = ["The code of the amber tower is 7712.", ask, "/reset", ask, "/quit", "no"]
    done = run("chat", "nano", "--temperature", "0", *FAST, text="\n".join(said))
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == 3
    assert ["7712" in answer for answer in answers[1:]] == [True, False]


def test_chat_survives_a_message_that_is_too_long():
    done = run("chat", "nano", "--max-model-len", "64", *FAST, text="x" * 2000 + "\nhi\n")
    assert done.returncode == 0
    assert "error: " in done.stderr
    assert done.stdout.strip()
