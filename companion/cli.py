"""The `companion` command: generate text, size a deployment, look at this machine."""

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence

from . import __version__, install_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. A mistake in the input is one line on stderr and code 2."""
    args = parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except ValueError as e:
        print(f"companion {args.command}: error: {e}", file=sys.stderr)
    except ModuleNotFoundError as e:
        hint = install_command("model")
        print(f"companion {args.command}: error: {e.name} is not installed; {hint}", file=sys.stderr)
    except ImportError as e:
        print(f"companion {args.command}: error: {e}", file=sys.stderr)
    except BrokenPipeError:  # the reader of our output has gone; nothing is left to flush to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as e:
        print(f"companion {args.command}: error: {e.filename or 'output'}: {e.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 2


class _Parser(argparse.ArgumentParser):
    """One line for a mistake; the usage is a --help away."""

    def error(self, message: str):
        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            message += _near(found[1], re.findall(r"[\w.-]+", found[2]))
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Command(_Parser):
    """A command answers for its own arguments, so that an error has its name and a near miss is found."""

    def parse_known_args(self, args=None, namespace=None):
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            mine = re.findall(r"--[\w-]+", self.format_usage())
            self.error(f"unknown argument {unknown[0]}{_near(unknown[0].split('=')[0], mine)}")
        return known, unknown


def _near(given: str, accepted: Sequence[str]) -> str:
    found = difflib.get_close_matches(given, accepted, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def parser() -> argparse.ArgumentParser:
    top = _Parser(prog="companion", description=__doc__)
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Command)

    from .cost import command as size

    sizing = commands.add_parser("size", help="does this model fit on that hardware, and how fast is it")
    size.add_arguments(sizing)
    sizing.set_defaults(run=size.run)

    from .lab import command as lab

    measuring = commands.add_parser("lab", help="measure this machine or an endpoint, against predictions")
    lab.add_arguments(measuring)
    measuring.set_defaults(run=lab.run)

    text = commands.add_parser("generate", help="continue a prompt with a real model")
    text.add_argument("prompt", help="text to continue")
    text.add_argument(
        "--model", default="smollm2-135m", help="a name, a .gguf file or a folder of safetensors"
    )
    text.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    text.add_argument("--chat", action="store_true", help="put the prompt to the model as a user's message")
    text.add_argument(
        "--temperature", type=float, default=0.0, help="0 (the default) takes the likeliest token"
    )
    text.add_argument("--top-k", type=int, default=0, help="0 keeps all")
    text.add_argument("--top-p", type=float, default=1.0)
    text.add_argument("--min-p", type=float, default=0.0)
    text.add_argument("--seed", type=int, default=None)
    text.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    text.add_argument("--no-cache", action="store_true", help="run the whole sequence again for each token")
    text.add_argument(
        "--prefill-chunk", type=int, default=None, metavar="N", help="read the prompt N tokens at a time"
    )
    text.add_argument("--json", action="store_true", help="print one JSON object when done")
    text.set_defaults(run=_generate)

    from .kernels import bench as kernels

    bench = commands.add_parser("bench", help="Triton kernels: compiled for any GPU, or timed on this one")
    kernels.add_arguments(bench)
    bench.set_defaults(run=kernels.run)

    doctor = commands.add_parser("doctor", help="what this machine has, and what will run on it")
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(run=_doctor)
    return top


def _generate(args: argparse.Namespace) -> int:
    from .generate import Sampler, generate, greedy
    from .generate.sampling import check_options
    from .model import load

    check_options(args.temperature, args.top_k, args.top_p, args.min_p)
    options = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "min_p": args.min_p}
    sampler = greedy if args.temperature == 0 else Sampler(**options, seed=args.seed)
    if not args.prompt:
        raise ValueError("the prompt is empty; a model needs at least one token to continue")
    model, tokenizer = load(args.model)
    prompt = tokenizer.chat([{"role": "user", "content": args.prompt}]) if args.chat else args.prompt
    shown = "" if args.chat else prompt  # with the first piece, so that a refused prompt prints nothing

    def tell(row: int, piece: str) -> None:
        nonlocal shown
        print(shown + piece, end="", flush=True)
        shown = ""

    g = generate(
        model,
        tokenizer.encode(prompt),
        cache=None if args.no_cache else "contiguous",
        max_new_tokens=args.max_new_tokens,
        sampler=sampler,
        prefill_chunk=args.prefill_chunk,
        tokenizer=tokenizer,
        stop=args.stop,
        on_text=None if args.json else tell,
    )
    if args.json:
        print(
            json.dumps(
                {
                    "model": model.spec.name,
                    "prompt": args.prompt,
                    "text": g.text,
                    "prompt_tokens": g.prompt_tokens,
                    "tokens": g.tokens,
                    "logprobs": g.logprobs,
                    "finish_reason": g.finish_reason,
                    "ttft_s": g.ttft_s,
                    "itl_s": g.itl_s,
                }
            )
        )
        return 0
    print(shown)
    rate = f", {len(g.itl_s) / sum(g.itl_s):.1f} tokens/s after it" if g.itl_s else ""
    print(
        f"[{g.prompt_tokens} + {len(g.tokens)} tokens, first after {g.ttft_s * 1e3:.0f} ms{rate}]",
        file=sys.stderr,
    )
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import report

    found = report()
    if args.json:
        print(json.dumps(found))
        return 0
    for section, rows in found.items():
        print(section)
        for name, value in rows.items():
            print(f"  {name:<22} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
