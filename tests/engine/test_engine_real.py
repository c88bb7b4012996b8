"""The real model: under pressure, what each request gets alone, wherever the choice was not nearly a tie."""

import torch

from companion.engine import Engine, Request
from companion.generate import generate

PROMPTS = ["The capital of France is", "def fib(n):", "The capital of France is Paris. The capital of Italy"]
NEW, MARGIN = 6, 1e-3


@torch.inference_mode()
def test_the_same_tokens_under_pressure(smollm2):
    model, tokenizer = smollm2
    prompts = [tokenizer.encode(p) for p in PROMPTS]
    engine = Engine(model, 6, 4, max_tokens_per_step=8, tokenizer=tokenizer)  # the longest takes five of six
    pieces = []
    for p in prompts:
        engine.add(Request(p, NEW, stop_ids=(), on_token=lambda e: pieces.append((e.id, e.text))))
    done = engine.run()
    compared = 0
    for id, (prompt, completion) in enumerate(zip(prompts, done, strict=True)):
        expected = generate(model, prompt, max_new_tokens=NEW, stop_ids=()).tokens
        top = model(torch.tensor([prompt + expected]))[0, len(prompt) - 1 : -1].topk(2).values
        near = (top[:, 0] - top[:, 1] <= MARGIN).nonzero()
        sure = int(near[0]) if len(near) else NEW
        assert completion.tokens[:sure] == expected[:sure]
        compared += sure
        assert completion.text == tokenizer.decode(completion.tokens)
        assert "".join(text for i, text in pieces if i == id) == completion.text
    assert compared >= 2 * NEW
    assert engine.manager.num_free == 6
