"""Mutation: a decoder that breaks one rule of its architecture differs from transformers, and visibly so."""

import importlib
from dataclasses import replace
from functools import cache

import pytest
import torch
from architecture_rules import RULES
from architectures import TINY, TOLERANCE, from_spec, ids, tiny

from companion.cost import ModelSpec
from companion.model import FAMILIES, Decoder

VISIBLE = 0.05  # five hundred times the tolerance of the parity tests


@pytest.fixture(scope="module")
def built():
    """architecture -> (transformers model, its weights, ids, its logits), built when first asked for."""

    @cache
    @torch.inference_mode()
    def get(name):
        hf, x = tiny(name), ids(2, 24)
        return hf, hf.state_dict(), x, hf(x).logits

    return get


@torch.inference_mode()
def difference(built, rule, monkeypatch):
    """The largest difference of a logit that the change of this rule makes."""
    hf, weights, x, want = built(rule.architecture)
    config = hf.config.to_dict()
    assert not rule.config or any(config.get(k) != v for k, v in rule.config.items()), "nothing changes"
    spec = rule.broken(ModelSpec.from_config(config | rule.config))
    if rule.family:
        family = replace(FAMILIES[rule.architecture], **rule.family)
        monkeypatch.setitem(FAMILIES, rule.architecture, family)
    if rule.patch:
        module, name, value = rule.patch
        monkeypatch.setattr(importlib.import_module(f"companion.model.{module}"), name, value)
    return (Decoder(spec, weights)(x) - want).abs().max().item()


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.architecture}: {r.name}")
def test_breaking_a_rule_shows(built, rule, monkeypatch):
    assert difference(built, rule, monkeypatch) > VISIBLE


@pytest.mark.parametrize("name", list(TINY))
def test_nothing_broken_is_nothing_changed(built, name, monkeypatch):
    hf, *_ = built(name)
    same = type(RULES[0])(name, "nothing")
    assert difference(built, same, monkeypatch) < TOLERANCE
    assert from_spec(hf) == same.broken(from_spec(hf))


def test_every_architecture_has_its_rules():
    names = [(r.architecture, r.name) for r in RULES]
    assert len(set(names)) == len(names)
    assert {a for a, _ in names} == set(TINY)


@torch.inference_mode()
def test_two_names_for_one_rule(built):
    """Softmax over all, top k, division by the sum: softmax over the chosen. No fixture tells them apart."""
    for name, other in (("mixtral", {"score": "topk_softmax"}), ("gpt_oss", {"score": "softmax"})):
        hf, weights, x, want = built(name)
        spec = from_spec(hf)
        routing = replace(spec.moe.routing, renormalize=True, **other)
        again = Decoder(replace(spec, moe=replace(spec.moe, routing=routing)), weights)(x)
        torch.testing.assert_close(again, want, rtol=0, atol=TOLERANCE)
