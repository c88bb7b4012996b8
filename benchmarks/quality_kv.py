"""What the precision of keys and values costs: distance to the exact cache on the frozen text.

    python -m benchmarks.quality_kv [--chunks N] [--step N] [--smoke] [--threads N]

The text is cut into chunks of 1,280 tokens. Of each, the first 1,024 are read once in float32 and their keys
and values put into every cache; over that cache the next 256 are predicted, teacher-forced, in steps of 8,
each quantized after it was read. Against the same over the exact cache: KL divergence, agreement of the
likeliest token, difference of the negative log-likelihood, a mean for each chunk.

The tokens of a step see each other exactly. Decoding is --step 1 (stored as quality_kv_step_1), where a token
sees only itself so; that costs more, and the caches without a tail come out worse.

Results are stored after every setting (companion/study/results/quality_kv.json); a run that was stopped
goes on where it was. --smoke: two settings on two short chunks, printed, not stored.
"""

import argparse
import platform
import time

import torch
import torch.nn.functional as F

from companion.caches import make_cache
from companion.machine import describe
from companion.model import load
from companion.stats import estimate, separated
from companion.study import store, text
from companion.study.divergence import STEP, continued, distance, fill, prompt
from companion.study.facts import SHA256

from .kv_settings import calibrated, settings
from .readback import ReadBack
from .resume import resumed

PREFIX, SCORED, BATCH = 1024, 256, 8
TRIAL = 512  # tokens at the end of the text, in no chunk, that fix the scales of nvfp4
NAME = "quality_kv"


def chunks(ids: list[int], count: int, prefix: int, scored: int) -> torch.Tensor:
    """(count, prefix + scored + 1): the last token of a chunk, only a target, is the first of the next."""
    size = prefix + scored
    if count * size + 1 + TRIAL > len(ids):
        raise ValueError(f"chunks={count} need {count * size + 1 + TRIAL} tokens; the text has {len(ids)}")
    return torch.tensor([ids[i * size : (i + 1) * size + 1] for i in range(count)])


def bits(cache, tokens: int) -> dict:
    """Bits per value, from the bytes stored: of the packed part with its scales, and of all `tokens` tokens.

    What is held in float32, the tail or one side of a pair, counts with 16 bits, as a server would hold it.
    """
    sides = [s for layer in cache._layers for s in (layer.k, layer.v)]
    each = [8 * s.unit_bytes / (s.unit * s.width * cache.spec.kv_heads) for s in sides]
    packed = sum(min(16, b) for b in each) / len(each)  # heads are equally wide for keys and values here
    tail = tokens - cache._layers[0].quantized[0]
    held = (packed * (tokens - tail) + 16 * tail) / tokens
    return {"bits": packed, "bits_held": held, "tail_tokens": tail, "at_tokens": tokens}


def measure(model, ids: torch.Tensor, table: dict, prefix: int, step: int, done: dict, save) -> None:
    """Every setting on these chunks (rows of ids); results go into `done[name]`, and `save()` is called."""
    start = time.process_time()
    held = prompt(model, ids[:, :prefix], room=ids.shape[1] - prefix)
    rest = ids[:, prefix:]
    exact = continued(model, held.fork(), rest, step=step)
    log(f"prompt and exact continuation of {len(ids)} chunks: {time.process_time() - start:.0f} s of CPU")
    before = done["reference"]["nll"]
    wanted = len(before) + len(ids)
    nll = F.cross_entropy(torch.cat(exact, dim=1).mT, rest[:, 1:], reduction="none").mean(1).tolist()
    for name, (codec, residual) in table.items():
        entry = done["settings"].setdefault(name, {"kl": [], "agree": [], "dnll": [], "kl_by_quarter": []})
        if len(entry["kl"]) >= wanted:
            continue
        start = time.process_time()
        cache = ReadBack(model.spec, batch=len(ids), max_tokens=ids.shape[1], codec=codec, residual=residual)
        fill(cache, held)
        entry |= bits(cache, prefix)
        d = distance(exact, model, cache, rest)
        for key, values in d.per_chunk().items():
            entry[key] += values
        entry["kl_by_quarter"] += [[float(x.mean()) for x in row.chunk(4)] for row in d.kl]
        entry["cpu_s_per_chunk"] = (time.process_time() - start) / len(ids)
        done["settings"][name] = entry
        save()
        log(line(name, entry))
    before += nll
    save()


def line(name: str, entry: dict) -> str:
    parts = {key: estimate(entry[key]) for key in ("kl", "agree", "dnll")}
    shown = "  ".join(f"{key} {e.mean:+.5f} se {e.se or 0:.5f}" for key, e in parts.items())
    tail = f"n {parts['kl'].n}  {entry['cpu_s_per_chunk']:.1f} s a chunk"
    return f"{name:<22} {entry['bits']:6.3f} bits  {shown}  {tail}"


def summarise(done: dict) -> None:
    """Means and standard errors of the settings measured on all chunks; which pairs these chunks separate."""
    n = len(done["reference"]["nll"])
    whole = {name: e for name, e in done["settings"].items() if len(e["kl"]) == n}
    for e in whole.values():
        e["summary"] = {k: vars(estimate(e[k])) for k in ("kl", "agree", "dnll")}
    done["pairs"] = {}
    for key in ("kl", "agree", "dnll"):
        rows = separated({name: e[key] for name, e in whole.items()})
        apart, open_ = [r for r in rows if r["apart"]], [r for r in rows if not r["apart"]]
        done["pairs"][key] = {
            "tested": len(rows),
            "apart_holm": len(apart),
            "beyond_two_se": sum(r["two_se"] for r in rows),
            "not_apart": [{k: v for k, v in r.items() if k not in ("apart", "p")} for r in open_],
        }


def checks(model, ids: torch.Tensor, prefix: int) -> dict:
    """On the first chunk: the fast cache against the real one; steps of 1 against steps of 8."""
    one = ids[:1]
    held = prompt(model, one[:, :prefix], room=one.shape[1] - prefix)
    rest = one[:, prefix:]
    exact = continued(model, held.fork(), rest)
    out = {}
    codec = settings(None)["int4 token asym g32"][0]
    for label, kind, options, step in (
        ("read_back", ReadBack, {}, STEP),
        ("quantized", lambda *a, **o: make_cache("quantized", *a, **o), {}, STEP),
        ("quantized_step_1", lambda *a, **o: make_cache("quantized", *a, **o), {}, 1),
    ):
        start = time.process_time()
        cache = kind(model.spec, batch=1, max_tokens=one.shape[1], codec=codec, **options)
        fill(cache, held)
        parts = exact if step == STEP else [y for x in exact for y in x.split(1, dim=1)]
        d = distance(parts, model, cache, rest)
        per_token = d.kl[0]
        out[label] = {
            "kl": float(per_token.mean()), "agree": float(d.agree.double().mean()),
            "se_over_tokens": float(per_token.std() / len(per_token) ** 0.5),
            "cpu_s": time.process_time() - start, "step": step,
        }  # fmt: skip
        log(f"check {label}: {out[label]}")
    # In one step, or quantized afterwards: the bytes are the same.
    cache = make_cache("quantized", model.spec, max_tokens=prefix, codec="kivi4")
    at_once = make_cache("quantized", model.spec, max_tokens=prefix, codec="kivi4")
    fill(cache, held)
    with torch.inference_mode():
        model(one[:, :prefix], at_once, logits="last")
    differing = [
        float((x - y).norm() / y.norm())
        for i in range(model.spec.layers)
        for x, y in zip(cache.read(i), at_once.read(i))
    ]
    out["prompt_in_one_pass"] = {"largest_relative_difference": max(differing)}
    log(f"check prompt in one pass against filled: {max(differing):.2e}")
    return out


def log(*parts) -> None:
    print(time.strftime("%H:%M:%S"), *parts, flush=True)


def run(
    model, ids: list[int], count: int, *, prefix=PREFIX, scored=SCORED, step=STEP, only=None, keep=True
) -> dict:
    """Measure `count` chunks, BATCH at a time. only: names of settings; keep: store, and go on from there."""
    rows = chunks(ids, count, prefix, scored)
    table = settings(calibrated(model, ids[-TRIAL:]))
    table = {key: table[key] for key in only or table}
    head = {
        "model": model.spec.name, "text_sha256": SHA256, "prefix": prefix, "scored": scored, "step": step,
        "seed": None, "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }  # fmt: skip
    done = {**head, "machine": describe(), "complete": False, "reference": {"nll": []}, "settings": {}}
    name = NAME if step == STEP else f"{NAME}_step_{step}"
    if keep:
        old = resumed(name, head)
        done |= {k: old[k] for k in ("reference", "settings", "checks") if k in old}

    def save():
        if keep:
            store(name, done)

    while (n := len(done["reference"]["nll"])) < count:
        measure(model, rows[n : n + BATCH], table, prefix, step, done, save)
        summarise(done)
        save()
    done["chunks"] = count
    del done["reference"]["nll"][count:]
    for entry in done["settings"].values():  # a run that was stopped among later chunks leaves some ahead
        for key in ("kl", "agree", "dnll", "kl_by_quarter"):
            del entry[key][count:]
    if keep and step == STEP and "checks" not in done:
        done["checks"] = checks(model, rows, prefix)
    summarise(done)
    done["complete"] = True
    save()
    return done


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--chunks", type=int, default=16)
    parse.add_argument("--step", type=int, default=STEP)
    parse.add_argument("--smoke", action="store_true")
    parse.add_argument("--threads", type=int, default=None)
    args = parse.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model, tokenizer = load("smollm2-135m")
    ids = tokenizer.encode(text())
    if args.smoke:
        done = run(model, ids, 2, prefix=64, scored=32, only=("int8", "kivi2 r0"), keep=False)
    else:
        done = run(model, ids, args.chunks, step=args.step)
    for name, entry in sorted(done["settings"].items(), key=lambda x: estimate(x[1]["kl"]).mean):
        print(line(name, entry))
    for key, p in done["pairs"].items():
        counts = f"{p['apart_holm']} apart after Holm, {p['beyond_two_se']} beyond 2 SE"
        print(f"{key}: of {p['tested']} pairs {counts}")


if __name__ == "__main__":
    main()
