"""Cross-entropy of a model on a folder of text, in nats per token, by samebit and (with --reference) by transformers.

    python -m benchmarks.heldout FOLDER --model src/samebit/assets/nano --context 4096 --windows 4 --reference

Files are read in sorted order, each preceded by token 0, into one stream; the stream is cut into windows without overlap,
and every token of a window but its first is predicted from the ones before it.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.reference import load_reference
from samebit import LLM
from samebit.engine.tokenizer import Tokenizer
from samebit.train.heldout import documents_stream, token_losses, windows


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--suffix", default=".py", help="which files to read")
    parser.add_argument("--context", type=int, default=4096, help="tokens a window")
    parser.add_argument("--windows", type=int, default=4, help="most windows to measure")
    parser.add_argument("--kernels", choices=("auto", "native", "torch"), default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--reference", action="store_true", help="measure with transformers too (eager, fp32)")
    args = parser.parse_args()
    measured, num_bytes = read_windows(args)
    llm = LLM(args.model, kernels=args.kernels, num_threads=args.threads)
    began = time.perf_counter()
    ours = [math.fsum(losses) / len(losses) for losses in token_losses(llm, measured)]
    spent = time.perf_counter() - began
    total = sum(ours) / len(ours)
    print(f"{len(measured)} windows of {args.context} tokens, {num_bytes:.3f} bytes a token")
    print(f"samebit       {total:.6f} nats/token, {total / math.log(2) / num_bytes:.4f} bits/byte, {spent:.1f} s")
    if args.reference:
        reference = load_reference(args.model)
        with torch.inference_mode():
            theirs = [mean_loss(reference(torch.tensor([w])).logits[0], w) for w in measured]
        print(f"transformers  {sum(theirs) / len(theirs):.6f} nats/token")
        print(f"largest difference of a window {max(abs(a - b) for a, b in zip(ours, theirs, strict=True)):.2e}")


def read_windows(args: argparse.Namespace) -> tuple[list[list[int]], float]:
    """Windows of token ids, spread evenly over the stream, and the stream's bytes per token."""
    texts = [p.read_text(encoding="utf-8").strip("\n") + "\n" for p in sorted(args.folder.rglob(f"*{args.suffix}"))]
    stream = documents_stream(Tokenizer(args.model), texts)
    if len(stream) < args.context:
        raise SystemExit(f"{args.folder}: {len(stream)} tokens do not fill a window of {args.context}")
    return windows(stream, args.context, args.windows), sum(len(text.encode()) for text in texts) / len(stream)


def mean_loss(logits: Tensor, window: list[int]) -> float:
    """Mean cross-entropy of tokens 1 .. of `window` under `logits` [T, V], accumulated in float64."""
    targets = torch.tensor(window[1:])
    return float(torch.nn.functional.cross_entropy(logits[:-1].double(), targets))


if __name__ == "__main__":
    main()
